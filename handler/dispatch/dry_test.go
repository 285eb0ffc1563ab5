package dispatch

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// TestDryChoiceOfAnUnknownUpstream has an upstream that the pool does not know: each
// look-up would make another worker of it.
func TestDryChoiceOfAnUnknownUpstream(t *testing.T) {
	for name, p := range map[string]*plan.Plan{
		"free":   {Wishes: plan.Wishes{Ext: &plan.NoExt}},
		"pinned": {Wishes: plan.Wishes{Ext: &plan.NoExt}, Pin: plan.Pin{Named: true, Worker: worker.DerivedID("new:1"), Field: "x"}},
	} {
		t.Run(name, func(t *testing.T) {
			p.HTTP = httptest.NewRequest(http.MethodGet, "/", nil)
			h := testHandler(t, "a:1")
			h.ReverseProxy.Upstreams = upstreamsOf("a:1", "new:1")
			c := testDispatcher(h).Explain(p)
			if c.Refused != nil {
				t.Fatalf("refused: %+v", c.Refused)
			}
			seen := make(map[string]int)
			for _, w := range c.Workers {
				seen[w.Dial]++
			}
			for _, l := range c.LeftOut {
				seen[l.Dial]++
			}
			if seen["a:1"] != 1 || seen["new:1"] != 1 {
				t.Errorf("candidates and left out: %v, want each worker once", seen)
			}
			if h.pool.Known("new:1") != nil {
				t.Error("the pool knows it now")
			}
		})
	}
}
