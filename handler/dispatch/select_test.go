package dispatch

import (
	"fmt"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// TestChoosingAllocatesAsMuchAmongMany chooses among few workers and many.
func TestChoosingAllocatesAsMuchAmongMany(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools at random")
	}
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
		p := &plan.Plan{Wishes: plan.Wishes{Ext: &plan.NoExt}, Prompt: plan.Prompt{Score: kvscore.Request{Prompt: cache.Prompt{Tokens: 100}, Streamed: true}}}
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

func upstreamsOf(dials ...string) (list reverseproxy.UpstreamPool) {
	for _, dial := range dials {
		list = append(list, &reverseproxy.Upstream{Dial: dial, Host: new(reverseproxy.Host)})
	}
	return list
}
