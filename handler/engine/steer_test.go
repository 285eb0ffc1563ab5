package engine

import (
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// TestExtraArgs asks for a transfer of KV blocks in the members that vLLM passes on.
func TestExtraArgs(t *testing.T) {
	for _, v := range [][2]string{
		{"/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"extra_args":{"kv_transfer_params":{"remote_host":"evil"}}}}`},
		{"/v1/chat/completions", `{"messages":[],"vllm_xargs":{"kv_transfer_params":"evil"}}`},
	} {
		for grants, stays := range map[nvext.Grants]bool{0: false, nvext.Pins: true} {
			got := adapted(t, VLLM, v[0], v[1], func(a *asked) { a.Grants = grants })
			if strings.Contains(string(got.body), "evil") != stays {
				t.Errorf("grants %v: %s", grants, got.body)
			}
		}
	}
}
