package tests

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// cpuTime returns the processor time that this process has taken.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestRetryMatchComesToAnEnd has the operator's retry_match match whatever the
// engines do. The last answer reaches the client, and nobody turns in a loop.
func TestRetryMatchComesToAnEnd(t *testing.T) {
	mine := canned.Fault{Kind: canned.Status, Status: http.StatusInternalServerError, Body: `{"error":"mine"}`}
	for _, v := range []struct {
		name, match string
		fault       canned.Fault
		status      int
	}{
		{"Status", `expression "{rp.status_code} == 500"`, mine, 500},
		{"Broken", "method POST", canned.Fault{Kind: canned.CloseAfterRead}, 502},
		{"Dead", "method POST", canned.Fault{}, 503},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, site("kv_router", engines, "lb_retry_match {\n"+v.match+"\n}"))
			for _, e := range engines {
				if e.SetFault(v.fault); v.name == "Dead" {
					e.Kill()
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			a := s.chat(ctx, ask("anybody?"))
			if a.status != v.status || v.fault.Body != "" && string(a.body) != v.fault.Body {
				t.Errorf("status %d, error %v, body %q; want %d", a.status, a.err, a.body, v.status)
			}
			if n := engines[0].Requests() + engines[1].Requests(); n > 2 {
				t.Errorf("%d attempts, want one on each", n)
			}
			s.booksAtZero(t)
		})
	}
}

// TestRetryMatchSendsTheBodyAgain has an answer matched that only the operator
// wants to be tried elsewhere.
func TestRetryMatchSendsTheBodyAgain(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, site("kv_router", engines, "lb_retry_match {\nexpression \"{rp.status_code} == 500\"\n}"))
	engines[0].SetFault(canned.Fault{Kind: canned.Status, Status: http.StatusInternalServerError, Body: "{}"})
	for i := range 4 {
		if a := s.mustChat(t, ask(fmt.Sprint("again ", i))); a.engine() != "e2" {
			t.Errorf("answered by %q", a.engine())
		}
	}
	s.booksAtZero(t)
}

// TestClientThatLeavesEndsTheRounds has clients leave while the only engine is
// away, and the operator lets requests be tried for longer.
func TestClientThatLeavesEndsTheRounds(t *testing.T) {
	for _, interval := range []string{"", "lb_try_interval 1ns"} {
		engines := startEngines(t, 1, canned.Pace{})
		s := startCaddy(t, site("kv_router", engines, "lb_try_duration 30s", interval))
		engines[0].Kill()
		ctx, leave := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer leave()
		var clients sync.WaitGroup
		for range 4 {
			clients.Go(func() { s.chat(ctx, ask("anybody?")) })
		}
		clients.Wait()
		eventually(t, 5*time.Second, "nobody turns in a loop", func() bool {
			before := cpuTime()
			time.Sleep(500 * time.Millisecond)
			return cpuTime()-before < 200*time.Millisecond
		})
		s.booksAtZero(t)
	}
}

// TestPoisonReachesTwoEnginesAtMost sends a request that ends each engine that
// it reaches, on new connections and on those that were kept alive.
func TestPoisonReachesTwoEnginesAtMost(t *testing.T) {
	for _, warm := range []bool{false, true} {
		t.Run(fmt.Sprint("warm=", warm), func(t *testing.T) {
			engines := startEngines(t, 6, canned.Pace{})
			s := startCaddy(t, route(engines, "policy round_robin"))
			if warm {
				for i := range 24 {
					s.mustChat(t, ask(fmt.Sprint("hi ", i)))
				}
			}
			var died atomic.Int64
			for _, e := range engines {
				e.SetHandler(func(_ http.ResponseWriter, r *http.Request) {
					if r.Method != http.MethodPost {
						return
					}
					died.Add(1)
					go e.Kill()
					<-r.Context().Done()
				})
			}
			a := s.chat(t.Context(), ask("poison").streamed())
			if a.status != http.StatusBadGateway || !strings.Contains(string(a.body), "worker_failed") {
				t.Errorf("status %d, body %q; want 502 and worker_failed", a.status, a.body)
			}
			if n := died.Load(); n != 2 {
				t.Errorf("%d engines died of one request, want 2", n)
			}
			s.booksAtZero(t)
		})
	}
}

// TestFirstTokenIsAwaitedOnTwoEnginesAtMost has a prompt that takes all engines
// longer than the deadline.
func TestFirstTokenIsAwaitedOnTwoEnginesAtMost(t *testing.T) {
	engines := startEngines(t, 6, canned.Pace{FirstToken: 3 * time.Second})
	s := startCaddy(t, route(engines, "timeouts {\nfirst_token 200ms\n}"))
	if a := s.chat(t.Context(), ask("a long one").streamed()); a.status != http.StatusGatewayTimeout {
		t.Errorf("status %d, want 504", a.status)
	}
	total := 0
	for _, e := range engines {
		total += e.Requests()
	}
	if total != 2 {
		t.Errorf("%d prefills were begun, want 2", total)
	}
	s.booksAtZero(t)
}
