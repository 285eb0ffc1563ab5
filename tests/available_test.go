package tests

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// available returns what the metrics say of a worker, and whether they do.
func (s *server) available(t testing.TB, dial string) (float64, bool) {
	t.Helper()
	return s.scrape(t).sum("caddy_kv_router_worker_available", `worker="`+dial+`"`)
}

// TestDeadWorkerIsNotAvailable kills a worker of two, while requests try it now
// and then: it must not be called available in between.
func TestDeadWorkerIsNotAvailable(t *testing.T) {
	a, b := startSimulated(t, engine.Config{Name: "a"}), startSimulated(t, engine.Config{Name: "b"})
	s := startCaddy(t, simulated([]*engine.Engine{a, b}, "policy round_robin"))
	s.mustChat(t, simChat("hello"))
	b.Kill()
	eventually(t, 10*time.Second, "the worker that was killed to be missed", func() bool {
		s.mustChat(t, simChat("hello"))
		v, said := s.available(t, b.Addr())
		return said && v == 0
	})
	for i := range 25 {
		if i%5 == 0 {
			s.mustChat(t, simChat(fmt.Sprint("question ", i)))
		}
		if v, _ := s.available(t, b.Addr()); v != 0 {
			t.Fatalf("look %d: a dead worker is available", i)
		}
		time.Sleep(200 * time.Millisecond)
	}
	if v, _ := s.available(t, a.Addr()); v != 1 {
		t.Error("the other one is not available")
	}
}

// TestWorkerThatCaddyTookOutIsNotAvailable has one worker fail Caddy's health
// checks.
func TestWorkerThatCaddyTookOutIsNotAvailable(t *testing.T) {
	check := func(status int) func(w http.ResponseWriter, r *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path == "/ok" {
				w.WriteHeader(status)
			}
			return r.URL.Path == "/ok"
		}
	}
	well, ill := startFake(t, check(200)), startFake(t, check(500))
	s := startCaddy(t, "kv_router {\nreverse_proxy "+well.addr()+" "+ill.addr()+" {\nhealth_uri /ok\nhealth_interval 100ms\n}\n}")
	s.mustChat(t, simChat("hello"))
	eventually(t, 10*time.Second, "the metric to say so", func() bool {
		v, said := s.available(t, ill.addr())
		return said && v == 0
	})
	if v, _ := s.available(t, well.addr()); v != 1 {
		t.Error("the other one is not available")
	}
}

// TestRemovedWorkerIsNotInTheMetrics drains a worker, takes it out of the
// configuration, and stops it.
func TestRemovedWorkerIsNotInTheMetrics(t *testing.T) {
	a, b := startSimulated(t, engine.Config{Name: "a"}), startSimulated(t, engine.Config{Name: "b"})
	s := startCaddy(t, simulated([]*engine.Engine{a, b}))
	s.mustChat(t, simChat("hello"))
	s.api(t, http.MethodPost, defaultPool+"/workers/"+b.Addr()+"/drain", nil, nil)
	if v, said := s.available(t, b.Addr()); v != 0 || !said {
		t.Errorf("a drained worker is available: %v, said %v", v, said)
	}
	if err := s.reload(simulated([]*engine.Engine{a})); err != nil {
		t.Fatal(err)
	}
	b.Kill()
	eventually(t, 10*time.Second, "the worker to be none any more", func() bool {
		s.mustChat(t, simChat("hello"))
		_, said := s.available(t, b.Addr())
		return !said
	})
}

// TestDrainedMeansAllRanks drains a worker with one request on one of its two
// ranks.
func TestDrainedMeansAllRanks(t *testing.T) {
	e := startSimulated(t, engine.Config{Flavour: engine.VLLM, Ranks: 2})
	s := startCaddy(t, simulated([]*engine.Engine{e}))
	s.mustChat(t, simChat("hello"))
	eventually(t, 10*time.Second, "the ranks to be known", func() bool { return len(s.told(t, e).Ranks) == 2 })
	if err := e.SetFault(engine.Fault{Kind: engine.Hang}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.chat(t.Context(), simChat("question").streamed())
	}()
	eventually(t, 10*time.Second, "the request to run", func() bool { return s.scrape(t).value(leases) == 1 })
	if s.fakeWorker(t, e.Addr()).Drained {
		t.Error("what nobody drains is drained")
	}
	s.api(t, http.MethodPost, defaultPool+"/workers/"+e.Addr()+"/drain", nil, nil)
	if s.fakeWorker(t, e.Addr()).Drained {
		t.Error("it is drained with a request on it")
	}
	e.Kill()
	<-ended
	eventually(t, 10*time.Second, "it to be drained", func() bool { return s.fakeWorker(t, e.Addr()).Drained })
}
