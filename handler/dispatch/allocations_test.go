//go:build !race

package dispatch // the race detector empties pools at random

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// everyField is an nvext with every field, less the token ids.
const everyField = `{"greed_sampling":true,"use_raw_prompt":true,"annotations":["request_id","token_ids"],"backend_instance_id":1,"max_thinking_tokens":512,` +
	`"extra_fields":["worker_id","timing"],"prefill_worker_id":1,"decode_worker_id":2,"dp_rank":0,"prefill_dp_rank":0,` +
	`"agent_hints":{"priority":5,"strict_priority":1,"osl":100,"speculative_prefill":false,"latency_sensitivity":1.5},"request_timestamp_ms":1.7e12,` +
	`"session_control":{"session_id":"s","timeout":60},"session_params":{"id":"s"},"cache_control":{"type":"ephemeral","ttl":"1h"},"cache_salt":"salt",` +
	`"routing_constraints":{"required_taints":["a"],"preferred_taints":{"b":1}},"router":{"ttft_target":200,"itl_target":5},` +
	`"metadata_upload":{"url":"s3://b/x"},"allowed_worker_ids":[1,2],"router_config_override":{"router_temperature":0.5},"token_data":[1,2,3]}`

// attemptAt plans a request and returns that of an attempt, as the transport has
// it.
func (h *harness) attemptAt(tb testing.TB, body []byte) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", io.NopCloser(bytes.NewReader(body)))
	r.ContentLength = int64(len(body))
	p, err := h.reader.Read(r)
	if err != nil {
		tb.Fatal(err)
	}
	w := h.pool.Worker("127.0.0.1:1")
	d := newTestAttempt(h, p, w)
	out := d.attempt.Build(r)
	out.Body.Close()
	d.Body.Done()
	return out
}

// TestPlanDoesNotGrowWithTheBody counts what a request with every field takes
// from the heap, of whatever length.
func TestPlanDoesNotGrowWithTheBody(t *testing.T) {
	h := testHandler(t, "127.0.0.1:1")
	count := func(tokens int) float64 {
		ids := strings.Repeat("1,", tokens-1) + "1"
		body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", 64) + `"}],"nvext":` +
			strings.Replace(everyField, "[1,2,3]", "["+ids+"]", 1) + `}`)
		return testing.AllocsPerRun(20, func() { h.attemptAt(t, body) })
	}
	few, many := count(2000), count(200_000)
	// The memory of a long body grows in up to four steps. A step makes two allocations if
	// its sync.Pool is empty. The garbage collector may empty it.
	if many > few+8 {
		t.Errorf("%v allocations, with a hundred times the tokens %v", few, many)
	}
}

// TestChoosingAllocatesAsMuchAmongMany chooses among few workers and many.
func TestChoosingAllocatesAsMuchAmongMany(t *testing.T) {
	count := func(n int) float64 {
		var dials []string
		for i := range n {
			dials = append(dials, fmt.Sprintf("127.0.0.1:%d", i+1))
		}
		h := testHandler(t, dials...)
		h.policy = kvscore.NewDynamo()
		for _, w := range h.pool.All() {
			w.ModelMetrics("") // the first request of a worker makes its metrics
		}
		p := &plan.Plan{Hints: plan.Hints{Ext: &plan.NoExt}, Prompt: plan.Prompt{Score: kvscore.Request{Prompt: cache.Prompt{Tokens: 100}, Streamed: true}}}
		return testing.AllocsPerRun(200, func() {
			d := newTestDispatch(h, p)
			if d.Select(t.Context(), h.ReverseProxy.Upstreams) == nil {
				t.Fatal("no worker")
			}
			d.endAttempt(true)
		})
	}
	if few, many := count(2), count(512); many > few+1 {
		t.Errorf("%v allocations among 512 workers, %v among 2", many, few)
	}
}
