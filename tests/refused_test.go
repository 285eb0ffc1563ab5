package tests

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// unworked are answers to a long prompt that an engine has not computed.
var unworked = map[string]http.HandlerFunc{
	"400":           refuseWith(http.StatusBadRequest),
	"413":           refuseWith(http.StatusRequestEntityTooLarge),
	"422":           refuseWith(http.StatusUnprocessableEntity),
	"402":           refuseWith(http.StatusPaymentRequired),
	"500":           refuseWith(http.StatusInternalServerError),
	"429 at last":   refuseWith(http.StatusTooManyRequests),
	"error in JSON": sendAs("application/json", `{"error":{"message":"too long","code":400}}`),
	"error event":   sendAs("text/event-stream", "data: {\"error\":{\"message\":\"too long\",\"code\":400}}\n\ndata: [DONE]\n\n"),
	"empty stream":  sendAs("text/event-stream", ""),
	"empty answer":  sendAs("application/json", `{"object":"chat.completion","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":0}}`),
}

func refuseWith(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		io.WriteString(w, `{"error":{"message":"no"}}`)
	}
}

// TestRefusedRequestsBookNothing has engines refuse a long prompt at once, some times. Nothing of it stays
// booked: the next choice takes the worker for as idle as it is.
func TestRefusedRequestsBookNothing(t *testing.T) {
	for name, refuse := range unworked {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, "pool default"))
			setAll(engines, refuse)
			for range 6 {
				c := ask(prose(rand.New(rand.NewPCG(1, 1)), 500_000, 500_000))
				c.Stream = strings.Contains(name, "stream") || strings.Contains(name, "event")
				s.chat(t.Context(), c, "X-Session-Id", "s")
			}
			s.booksAtZero(t)
			for _, c := range s.explain(t, ask("hi").body()).Candidates {
				if c.Wait != 0 || c.Active != 0 || c.Work > 1000 || c.Outlier {
					t.Errorf("after the refusals, %s has %+v", c.Dial, c)
				}
			}
		})
	}
}

// TestAgentStaysAfterAnOverflow has an agent whose third turn is too long for the model. It goes on with
// a summary at once, at the engine that has computed the beginning.
func TestAgentStaysAfterAnOverflow(t *testing.T) {
	var engines []*engine.Engine
	for i := range 2 {
		e, err := engine.Start(engine.Config{Name: fmt.Sprint("e", i+1), MaxModelLen: 16_384, Speed: 5, AnswerTokens: 8})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		engines = append(engines, e)
	}
	s := startCaddy(t, simulated(engines, "pool default"))
	rng := rand.New(rand.NewPCG(2, 2))
	for i := range 4 {
		c := simChat(prose(rng, 30_000, 30_000))
		home := s.mustChat(t, c).engine()
		c.Messages = append(c.Messages, message{"assistant", "well"}, message{"user", "go on"})
		s.mustChat(t, c)
		tooLong := c
		tooLong.Messages = append(tooLong.Messages[:2:2], message{"user", prose(rng, 100_000, 100_000)})
		if a := s.chat(t.Context(), tooLong); a.status != http.StatusBadRequest {
			t.Fatalf("status %d, want 400", a.status)
		}
		c.Messages = append(c.Messages[:1:1], message{"assistant", "a summary"}, message{"user", "go on"})
		if a := s.mustChat(t, c); a.engine() != home {
			t.Errorf("agent %d: the turn after the refusal went to %s, not to %s", i, a.engine(), home)
		}
	}
}

// TestWorkerThatRefusesAllGetsItsShare has one of four engines refuse all requests at once, beside engines
// that take their time. The worker looks idle, and is not preferred. The admin API says why.
func TestWorkerThatRefusesAllGetsItsShare(t *testing.T) {
	for _, policy := range []string{"predicted_latency", "least_load"} {
		t.Run(policy, func(t *testing.T) {
			engines := startEngines(t, 4, canned.Pace{FirstToken: 100 * time.Millisecond, Words: 2})
			s := startCaddy(t, route(engines, "pool default", "policy "+policy))
			engines[0].SetHandler(refuseWith(http.StatusBadRequest))
			var n atomic.Int64
			talk := func(clients, turns int) {
				var all sync.WaitGroup
				for range clients {
					all.Go(func() {
						for range turns {
							rng := rand.New(rand.NewPCG(3, uint64(n.Add(1)))) //nolint:gosec // small
							s.chat(t.Context(), ask(prose(rng, 2000, 4000)).streamed())
						}
					})
				}
				all.Wait()
			}
			talk(16, 5) // it is found out
			before, sent := engines[0].Requests(), n.Load()
			talk(16, 15)
			if share := float64(engines[0].Requests()-before) / float64(n.Load()-sent); share > 0.35 {
				t.Errorf("the worker that refuses all gets %.0f %% of the requests", 100*share)
			}
			w := s.worker(t, engines[0].Addr())
			if !w.Load.Outlier || w.Health.ErrorsApart { // the errors may be the clients' mistakes, and are no alarm
				t.Errorf("the admin API does not show it: %+v", w)
			}
			outliers := 0
			for _, c := range s.explain(t, ask("hi").body()).Candidates {
				if c.Outlier {
					outliers++
				}
			}
			if outliers != 1 {
				t.Errorf("%d outliers are explained", outliers)
			}
		})
	}
}
