package tests

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestResetOfTheCacheIsNoticed has engines lose their caches twice, as with weight updates of reinforcement
// learning, while 24 conversations go on. The router notices each loss, and learns no capacity from it.
func TestResetOfTheCacheIsNoticed(t *testing.T) {
	for name, v := range map[string]struct {
		cfg    engine.Config
		reset  string
		events bool
	}{
		"vLLM":              {engine.Config{Flavour: engine.VLLM}, engine.ResetPath, false},
		"vLLM with events":  {engine.Config{Flavour: engine.VLLM, Events: &engine.EventConfig{}}, engine.ResetPath, true},
		"SGLang":            {engine.Config{Flavour: engine.SGLang}, engine.FlushPath, false},
		"vLLM of two ranks": {engine.Config{Flavour: engine.VLLM, Ranks: 2}, engine.ResetPath, false},
	} {
		t.Run(name, func(t *testing.T) {
			const tokens = 131072
			v.cfg.Blocks, v.cfg.MaxModelLen = tokens/16, 8192
			engines := []*engine.Engine{startSimulated(t, v.cfg), startSimulated(t, v.cfg)}
			s := startCaddy(t, simulated(engines, "response_headers X-KV-"))
			for _, e := range engines {
				s.awaitType(t, e.Addr(), string(v.cfg.Flavour))
			}
			before := s.scrape(t)
			cleared := func() float64 { return s.scrape(t).value(mirrorCleared) - before.value(mirrorCleared) }
			talks := make([]chat, 24)
			for i := range talks {
				talks[i] = chatOf(uint64(i), 800)
			}
			var homes []string
			for turn := range 8 {
				lost, wrong, moved := cleared(), 0, 0
				if turn == 2 || turn == 5 {
					for _, e := range engines {
						resp, err := http.Post(e.URL()+v.reset, "", nil)
						if err != nil || resp.StatusCode != http.StatusOK {
							t.Fatal(err, resp)
						}
						resp.Body.Close()
					}
				}
				for i := range talks {
					a := s.mustChat(t, talks[i], "X-Session-Id", fmt.Sprint("talk ", i))
					predicted, cached := 0, 0
					cached, _ = a.cached(t)
					_, _ = fmt.Sscan(a.header.Get("X-Kv-Predicted-Cached-Tokens"), &predicted)
					home := a.header.Get("X-Kv-Worker")
					if off := predicted - cached; off > 64 || off < -64 {
						wrong++
					}
					if homes = append(homes, home); turn > 0 && home != homes[len(homes)-1-len(talks)] {
						moved++
					}
					rng := rand.New(rand.NewPCG(uint64(turn), uint64(i))) //nolint:gosec // a test
					talks[i].Messages = append(talks[i].Messages, message{"assistant", a.text}, message{"user", prose(rng, 200, 300)})
				}
				t.Logf("turn %d: %d predictions are wrong, %d conversations moved, %v caches cleared", turn, wrong, moved, cleared()-lost)
				targets := 2 * max(v.cfg.Ranks, 1)
				switch reset, after := turn == 2 || turn == 5, turn == 3 || turn == 6; {
				case reset:
					if n := int(cleared() - lost); !v.events && (n > targets || n < targets-1) || wrong > 4*targets { // one may have too few conversations
						t.Errorf("turn %d: %d caches were cleared, of %d, and %d predictions were wrong", turn, n, targets, wrong)
					}
				// What was computed between the loss and the first prompt that showed it is forgotten, too.
				case cleared() > lost, wrong > 2 && after, wrong > 0 && !after, moved > 2:
					t.Errorf("turn %d: %d predictions are wrong, %d conversations moved, %v caches cleared", turn, wrong, moved, cleared()-lost)
				}
				for _, w := range s.workers(t) {
					if slices.ContainsFunc(engines, func(e *engine.Engine) bool { return e.Addr() == w.Dial }) && w.Cache.Learned {
						t.Errorf("turn %d: learned a capacity of %d tokens", turn, w.Cache.Capacity)
					}
				}
			}
		})
	}
}
