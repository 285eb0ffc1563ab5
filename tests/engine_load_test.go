package tests

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const engineRequests = "caddy_kv_router_worker_engine_requests"

// others returns how many requests of other clients the router sees on an engine, -1 if it
// does not know.
func (s *server) others(t testing.TB, e *engine.Engine) (n int) {
	t.Helper()
	for _, r := range s.worker(t, e.Addr()).Ranks {
		if r.Engine == nil {
			return -1
		}
		if n += r.Engine.Others; r.Engine.Age < 0 || r.Engine.Age > 3.5 {
			t.Errorf("a report is %v s old", r.Engine.Age)
		}
	}
	return n
}

// startLoaded starts an engine at the speed of a real one, with long answers.
func startLoaded(t *testing.T, cfg engine.Config) *engine.Engine {
	t.Helper()
	cfg.Model, cfg.AnswerTokens = "sim-8b", 8000
	e, err := engine.Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// keepBusy sends requests to an engine directly, and keeps them there until stop is called.
func keepBusy(t *testing.T, e *engine.Engine, n int) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	for i := range n {
		clients.Go(func() {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+"/v1/chat/completions", bytes.NewReader(simChat(fmt.Sprint("direct ", i)).streamed().body()))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Content-Type", "application/json")
			if resp, err := http.DefaultClient.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
	eventually(t, "the engine to be busy", func() bool {
		running := 0
		for _, r := range e.Loads() {
			running += r.Running + r.Waiting
		}
		return running == n
	})
	return func() {
		cancel()
		clients.Wait()
	}
}

// TestOtherClientsAreSeen has two engines, and other clients that keep one of them busy. With
// the option, the router's requests avoid that engine. Without it they do not, if the policy does not learn
// that the engine is slow.
func TestOtherClientsAreSeen(t *testing.T) {
	const direct, requests = 24, 40
	for _, v := range []struct {
		flavour        engine.Flavour
		option, policy string
	}{{engine.VLLM, "", "policy least_load"}, {engine.VLLM, "engine_load", ""}, {engine.SGLang, "engine_load on", ""}} {
		t.Run(fmt.Sprint(v.flavour, " ", v.option), func(t *testing.T) {
			engines := []*engine.Engine{
				startLoaded(t, engine.Config{Name: "busy", Flavour: v.flavour}), startLoaded(t, engine.Config{Name: "free", Flavour: v.flavour}),
			}
			busy, on := engines[0], v.option != ""
			stop := keepBusy(t, busy, direct)
			defer stop()
			s := startCaddy(t, simulated(engines, v.policy, "worker * {\n"+v.option+"\n}"))
			rng := rand.New(rand.NewPCG(1, 1))
			ask := func() string {
				c := simChat(prose(rng, 500, 600)).streamed()
				c.MaxTokens = 4
				return s.mustChat(t, c).engine()
			}
			ask() // the prober begins with the first request
			if on {
				eventually(t, "the other clients to be seen", func() bool { return s.others(t, busy) == direct && s.others(t, engines[1]) == 0 })
				if n := s.scrape(t).value(engineRequests, `worker="`+busy.Addr()+`"`, `state="running"`); n != direct {
					t.Errorf("%s is %v, want %d", engineRequests, n, direct)
				}
			}
			there := 0
			for range requests {
				if ask() == busy.Name() {
					there++
				}
			}
			t.Logf("%d of %d requests are on the busy engine", there, requests)
			if on && there > 0 || !on && there < requests/4 {
				t.Errorf("%d of %d requests are on the busy engine", there, requests)
			}
			if _, found := s.scrape(t).sum(engineRequests); !on && (found || s.others(t, busy) != -1) {
				t.Error("the option is off, and a load is reported")
			}
			s.booksAtZero(t)
			if stop(); on {
				eventually(t, "the other clients to be gone", func() bool { return s.others(t, busy) == 0 })
			}
		})
	}
}
