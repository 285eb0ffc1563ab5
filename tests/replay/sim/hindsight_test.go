package sim

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

func TestThePlacesOfAPolicyGiveItsFigures(t *testing.T) {
	for _, closed := range []bool{false, true} {
		c := cell(synthetic(t, 300, closed), "predicted_latency")
		want := mustRun(t, c)
		c.Places = want.Places
		if got := mustRun(t, c); got.Figures != want.Figures {
			t.Errorf("closed %v: %+v, want %+v", closed, got.Figures, want.Figures)
		}
	}
}

// TestHindsight has two prompts by turns, of which an engine can hold one. In the order of
// arrival, each engine gets both.
func TestHindsight(t *testing.T) {
	tr := &trace.Trace{BlockTokens: 64}
	for i := range 40 {
		chain := blocks(80)
		if i/2%2 == 1 {
			for k := range chain {
				chain[k] += 1000
			}
		}
		tr.Requests = append(tr.Requests, trace.Request{At: time.Duration(i) * time.Second, In: 80 * 64, Out: 10, Blocks: chain})
	}
	c := cell(tr, "round_robin")
	c.Workers, c.KVTokens = 2, 100*64
	start := mustRun(t, c)
	c.Places, c.Counted = start.Places, make([]bool, len(tr.Requests))
	for n := range c.Counted {
		c.Counted[n] = n >= 4
	}
	best, err := Hindsight(c, func(f *Figures) float64 { return f.MeanTTFT }, 5000)
	if err != nil {
		t.Fatal(err)
	}
	if start.HitRatio > 0.3 || best.HitRatio < 0.95 || best.MeanTTFT > 0.2*start.MeanTTFT {
		t.Errorf("%+v, from %+v", best.Figures, start.Figures)
	}
	c.Places = best.Places
	if again := mustRun(t, c); again.Figures != best.Figures {
		t.Errorf("the places give %+v, not %+v", again.Figures, best.Figures)
	}
}
