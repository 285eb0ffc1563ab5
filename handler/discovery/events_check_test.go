package discovery

import (
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestEventsAreDoubted has an engine report other cached tokens than its KV events say.
func TestEventsAreDoubted(t *testing.T) {
	for _, c := range []struct {
		name                string
		predicted, reported int64
		prompts, reports    int
		doubted             bool
	}{
		{"as predicted", 5000, 4900, 100, 100, false},
		{"far less, again and again", 5000, 0, 100, manyMissed, true},
		{"far less, not often enough", 5000, 0, 100, manyMissed - 1, false},
		{"far less of few prompts", 5000, 0, manyMissed - 1, 100, false},
		{"cached, and no event says so", 0, 640, 100, manyUnmatched, true},
		{"not often enough", 0, 640, 100, manyUnmatched - 1, false},
	} {
		x := Of(testPool(t, wanted(pool.WorkerSettings{Dial: "a:1"})).Worker("a:1"))
		for i := range c.reports {
			x.Verify(&Prediction{Prompt: uint64(i % c.prompts), Tokens: c.predicted, Knowledge: kvscore.Exact}, c.reported)
		}
		if got := x.eventsCheck.isDoubted(); got != c.doubted {
			t.Errorf("%s: doubted is %v, want %v", c.name, got, c.doubted)
		}
		x.Restarted()
		if x.eventsCheck.isDoubted() {
			t.Errorf("%s: doubted after a restart", c.name)
		}
	}
}
