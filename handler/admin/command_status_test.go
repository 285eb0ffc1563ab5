package admin

import (
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// TestStatusTellsNamesApart cuts long names to the width of a terminal, and cuts none without one.
func TestStatusTellsNamesApart(t *testing.T) {
	list := []workerView{
		{Dial: "vllm-0.vllm.models.svc.cluster.local:8000", State: stateOK, Role: engine.RoleBoth, Models: modelsView{Listed: []string{"Qwen/Qwen3-Coder-480B-A35B-Instruct"}}},
		{Dial: "vllm-1.vllm.models.svc.cluster.local:8000", State: stateOK, Role: engine.RoleBoth, Models: modelsView{Listed: []string{"Qwen/Qwen3-235B-A22B-Instruct"}}},
	}
	for width, want := range map[int][]string{
		80:  {"vllm-0.v", "vllm-1.v", "Qwen3-Coder", "Qwen3-235B"},
		999: {list[0].Dial + " ", list[1].Dial + " ", list[0].Models.Listed[0] + " "},
	} {
		var b strings.Builder
		writeWorkers(&b, list, width)
		for _, text := range want {
			if !strings.Contains(b.String(), text) {
				t.Errorf("%d columns: no %q in\n%s", width, text, b.String())
			}
		}
		for line := range strings.Lines(b.String()) {
			if n := len([]rune(line)); n > width {
				t.Errorf("%d columns, want at most %d: %s", n, width, line)
			}
		}
		if strings.Contains(b.String(), "TTFT") {
			t.Errorf("a column without figures is shown:\n%s", b.String())
		}
	}
}
