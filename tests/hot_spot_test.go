package tests

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestSharedKeyMakesNoHotSpot has 200 clients that all send one session key, and clients with
// a session each. The former have long requests about texts of their own, after a common
// system prompt. They spread over the engines. The latter stay at home. Its bounds allow for a
// busy machine; the replay in virtual time has narrower ones.
func TestSharedKeyMakesNoHotSpot(t *testing.T) {
	if testing.Short() || underRace {
		t.Skip("it takes many seconds of full load")
	}
	const crowd, singles = 200, 16
	engines := make([]*engine.Engine, 4)
	for i := range engines {
		var err error
		if engines[i], err = engine.Start(engine.Config{Name: fmt.Sprint("e", i+1), Model: "canned", AnswerTokens: 200, Speed: 1}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(engines[i].Close)
	}
	s := startCaddy(t, simulated(engines, "response_headers X-KV-"))
	system := message{"system", prose(rand.New(rand.NewPCG(1, 1)), 4000, 4000)}

	end := time.Now().Add(12 * time.Second)
	var clients sync.WaitGroup
	for i := range crowd {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(2, uint64(i)))
			for time.Now().Before(end) {
				c := ask(prose(rng, 2000, 8000)).streamed()
				c.Messages = slices.Insert(c.Messages, 0, system)
				if a := s.chat(t.Context(), c, "X-Session-Id", "shared"); !a.ok() {
					t.Errorf("status %d, %v", a.status, a.err)
					return
				}
			}
		})
	}
	var mu sync.Mutex
	turns, home := 0, 0
	for i := range singles {
		clients.Go(func() {
			rng, last := rand.New(rand.NewPCG(3, uint64(i))), ""
			c := ask(prose(rng, 8000, 8000)).streamed()
			c.MaxTokens = 24
			for time.Now().Before(end) {
				a := s.chat(t.Context(), c, "X-Session-Id", fmt.Sprint("single-", i))
				if !a.ok() {
					t.Errorf("status %d, %v", a.status, a.err)
					return
				}
				mu.Lock()
				if last != "" {
					turns++
					if a.engine() == last {
						home++
					}
				}
				mu.Unlock()
				last = a.engine()
				c.Messages = append(c.Messages, message{"assistant", a.text}, message{"user", prose(rng, 100, 400)})
			}
		})
	}
	ratios := inFlight(t, s, engines, end, crowd*3/4)
	clients.Wait()
	mean := 0.0
	for _, r := range ratios {
		mean += r / float64(len(ratios))
	}
	if mean > 1.5 || len(ratios) < 10 || turns < 16 || 10*home < 8*turns {
		t.Errorf("the shared key makes a hot spot, or sessions leave their homes")
	}
	t.Logf("in flight, max/mean: mean %.2f, at most %.2f, of %d looks; %d of %d turns at home", mean, slices.Max(append(ratios, 0)), len(ratios), home, turns)
	s.booksAtZero(t)
}

// inFlight looks at the workers' active requests until a time. It returns their maximum
// divided by their mean for each look with at least so many of them.
func inFlight(t *testing.T, s *server, engines []*engine.Engine, end time.Time, least int) (ratios []float64) {
	t.Helper()
	for time.Now().Before(end) {
		time.Sleep(100 * time.Millisecond)
		m, most, sum := s.scrape(t), 0.0, 0.0
		for _, e := range engines {
			n := m.value(workerRequests, `worker="`+e.Addr()+`"`)
			most, sum = max(most, n), sum+n
		}
		if sum >= float64(least) {
			ratios = append(ratios, most*float64(len(engines))/sum)
		}
	}
	return ratios
}

// TestCrowdLeavesHome has 40 concurrent requests with one session key and a policy without a
// price. The first few go home, and the others where the policy sends them.
func TestCrowdLeavesHome(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{})
	s := startCaddy(t, route(engines, "policy least_load", "response_headers X-KV-"))
	home := s.mustChat(t, ask("turn 1"), "X-Session-Id", "shared").engine()
	gates := make([]*gate, len(engines))
	for i, e := range engines {
		gates[i] = hold(e)
	}
	const n = 40
	waiting := make([]asked, n)
	for i := range n {
		waiting[i] = s.startChat(t, fmt.Sprint("question ", i), "X-Session-Id", "shared")
	}
	most := 0.0
	eventually(t, 10*time.Second, "all to be under way", func() bool {
		m, sum := s.scrape(t), 0.0
		most = 0
		for _, e := range engines {
			v := m.value(workerRequests, `worker="`+e.Addr()+`"`)
			most, sum = max(most, v), sum+v
		}
		return sum == n
	})
	if most > 1.5*n/4 {
		t.Errorf("%v of %d requests are on one engine", most, n)
	}
	for _, g := range gates {
		g.opened(t)
	}
	for _, q := range waiting {
		if a := q.wait(t); !a.ok() {
			t.Errorf("status %d, error %v", a.status, a.err)
		}
	}
	if a := s.mustChat(t, ask("turn 2"), "X-Session-Id", "shared"); a.engine() != home {
		t.Errorf("the next turn is on %s, want %s", a.engine(), home)
	}
}
