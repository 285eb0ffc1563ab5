package tests

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const workersHung = "caddy_kv_router_workers_hung"

// TestHungEnginesAreFound hangs two of four engines without any deadline: one after its
// header, the other before it. 24 clients wait without a limit. Others come and leave
// after two seconds.
func TestHungEnginesAreFound(t *testing.T) {
	takesSeconds(t)
	level := runtime.NumGoroutine()
	engines := startEngines(t, 4, canned.Pace{Words: 10, FirstToken: 10 * time.Millisecond, PerWord: time.Millisecond})
	s := startCaddy(t, route(engines, "pool hung", "policy round_robin")) // which gives all as much
	hung := func() float64 {                                              // a busy machine may hold up others
		m := s.scrape(t)
		return m.value(workersHung, fmt.Sprintf("worker=%q", engines[0].Addr())) + m.value(workersHung, fmt.Sprintf("worker=%q", engines[1].Addr()))
	}
	home := make(map[string]string) // of sessions from before
	for i := range 16 {
		key := fmt.Sprintf("session-%d", i)
		// long enough to show how fast the engines prefill
		home[key] = s.mustChat(t, ask(key+strings.Repeat(" once upon a time", 150)).streamed(), "X-Session-Id", key).engine()
	}
	before := s.scrape(t)
	goOn := make(chan struct{})
	engines[0].SetHandler(stall(goOn))
	engines[1].SetFault(canned.Fault{Kind: canned.HangBeforeHeader})

	start := time.Now()
	var patient sync.WaitGroup
	var served [5]atomic.Int64 // by engine
	for i := range 24 {
		patient.Go(func() {
			a := s.chat(t.Context(), ask(fmt.Sprintf("patient %d", i)).streamed())
			if !a.ok() {
				t.Errorf("a patient client: status %d, error %v, by %q, body %q", a.status, a.err, a.engine(), a.body)
				return
			}
			if e := a.engine(); e != "" { // else the router has begun the answer while the engine hung
				served[e[1]-'0'].Add(1)
			}
		})
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var passers sync.WaitGroup
	for i := range 4 {
		passers.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				ctx, leave := context.WithTimeout(ctx, 2*time.Second)
				s.chat(ctx, ask(fmt.Sprintf("passer-by %d %d %s", i, n, strings.Repeat("why? ", 20))).streamed())
				leave()
				pausing(ctx, 10*time.Millisecond)
			}
		})
	}
	eventually(t, "both are found to hang", func() bool { return hung() == 2 })
	if d := time.Since(start); d < 15*time.Second {
		t.Errorf("found after %v already", d)
	}
	// Sessions move with their next turn. One of each worker may be what shows whether that still hangs. It is
	// served later, by another one, maybe behind the header of its own.
	var turns sync.WaitGroup
	var late atomic.Int32
	for key, e := range home {
		if e > "e2" {
			continue
		}
		turns.Go(func() {
			turn := time.Now()
			a := s.chat(t.Context(), ask(key+" again").streamed(), "X-Session-Id", key)
			tries := time.Since(turn) > 10*time.Second
			if !a.ok() || a.engine() < "e3" && !tries {
				t.Errorf("%s of %s: status %d, error %v, by %q", key, e, a.status, a.err, a.engine())
			}
			if tries {
				late.Add(1)
			}
		})
	}
	turns.Wait()
	retried := s.scrape(t).value(retriesTotal, `pool="hung"`, `reason="hung"`) - before.value(retriesTotal, `pool="hung"`, `reason="hung"`)
	if late.Load() > 2 || retried < 3 {
		t.Errorf("%d sessions waited for workers that hang, %v requests were made elsewhere; want 2 at most, and those that had no header", late.Load(), retried)
	}
	// One at a time shows whether they still hang. An engine may not have noticed the end of the one before.
	active := func() int { return engines[0].Active() + engines[1].Active() }
	held, was := active(), engines[2].Requests()
	eventually(t, "more traffic", func() bool {
		if n := active(); n > held+4 {
			t.Fatalf("%d requests are at engines that hang, were %d", n, held)
		}
		return engines[2].Requests() > was+100
	})

	// That they hung does not make them slow to the default policy.
	s.mustReload(t, route(engines, "pool hung"))
	close(goOn)
	engines[0].SetHandler(nil)
	engines[1].SetFault(canned.Fault{})
	patient.Wait()
	if served[1].Load() == 0 || served[2].Load() != 0 {
		t.Errorf("patient clients were served %d times by e1 and %d times by e2, want those of e1 to stay and those of e2 to move", served[1].Load(), served[2].Load())
	}
	eventually(t, "neither hangs any more", func() bool { return hung() == 0 })
	was0, was1 := engines[0].Requests(), engines[1].Requests()
	eventually(t, "both are used again", func() bool { return engines[0].Requests() > was0+10 && engines[1].Requests() > was1+10 })
	right(t, func() string { // on a busy machine also of others
		if hung, well := s.logged(t, "worker is hung"), s.logged(t, "worker makes progress again"); hung < 2 || hung != well {
			return fmt.Sprintf("%d log lines say that a worker is hung, and %d that it makes progress again", hung, well)
		}
		return ""
	})
	stop()
	passers.Wait()
	s.booksAtZero(t)
	goroutines(t, s, engines, level)
}

// asEngine has the test binary be a simulated engine at an address.
const asEngine = "KVROUTER_TEST_AS_ENGINE"

// storyLength is how many tokens its answers have, and those of its peer. They take some seconds.
const storyLength = 800

func runEngine(addr string) {
	if _, err := engine.Start(engine.Config{Name: "frozen", Addr: addr, AnswerTokens: storyLength}); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	select {}
}

// TestFrozenEngineHasTheLastStreams freezes the process of an engine in the middle of streams. There are
// no other requests, so that soon its streams are all that is under way. They go on at the other engine.
func TestFrozenEngineHasTheLastStreams(t *testing.T) {
	takesSeconds(t)
	addr := freeAddr(t)
	frozen := exec.Command(os.Args[0]) //nolint:gosec // this program
	frozen.Env = append(os.Environ(), asEngine+"="+addr)
	noError(t, frozen.Start())
	t.Cleanup(func() {
		_ = frozen.Process.Kill()
		_ = frozen.Wait()
	})
	other := startSimulated(t, engine.Config{Name: "other", Speed: 1, AnswerTokens: storyLength})
	s := startCaddy(t, "kv_router "+addr+" "+other.Addr()+" {\npolicy round_robin\n}") // each gets half of the streams
	s.awaitType(t, addr, "vllm")
	s.awaitType(t, other.Addr(), "vllm")
	var all sync.WaitGroup
	var there atomic.Int64
	before := s.scrape(t).value(firstToken + "_count")
	for i := range 12 {
		all.Go(func() {
			a := s.chat(t.Context(), simChat(fmt.Sprintf("tell story %d %s", i, strings.Repeat("of old ", 40))).streamed())
			if !a.ok() {
				t.Errorf("stream %d of %s: status %d, error %v, body ends %q", i, a.engine(), a.status, a.err, a.body[max(0, len(a.body)-200):])
			}
			if a.engine() == "frozen" {
				there.Add(1)
			}
		})
	}
	eventually(t, "all to have tokens", func() bool { return s.scrape(t).value(firstToken+"_count") >= before+12 })
	noError(t, frozen.Process.Signal(syscall.SIGSTOP))
	all.Wait() // the frozen engine ends none of them
	if there.Load() == 0 {
		t.Error("the frozen engine had no stream")
	}
	if s.scrape(t).value("caddy_kv_router_resumed_total", `cause="hung"`) == 0 {
		t.Error("no stream went on elsewhere")
	}
}

// TestRetriesStayWithinTheBudget has both engines refuse, with a small retry budget.
// Further requests get the refusal, and the engines get no more retries than the budget
// allows.
func TestRetriesStayWithinTheBudget(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "pool poor", "retry_budget 10% 0.5/s"))
	before, begun := s.scrape(t), time.Now()
	for _, e := range engines {
		e.SetFault(refusal)
	}
	const requests = 160
	atOnce(32, func(int) {
		for range requests / 32 {
			wantAnswer(t, s.chat(t.Context(), ask("anybody?").streamed()), refusal)
		}
	})
	sent := engines[0].Requests() + engines[1].Requests()
	// a tenth, and five of the ten seconds before, and half of one in each second since
	if retries, most := sent-requests, 22+int(time.Since(begun).Seconds()/2); retries < 18 || retries > most {
		t.Errorf("%d retries for %d requests, want 18 to %d", retries, requests, most)
	}
	s.wantFigures(t, before, []figure{
		{retriesTotal, []string{`pool="poor"`, `reason="503"`}, float64(sent - requests)},
		{workerOutcomes, []string{`pool="poor"`, `outcome="retried"`}, float64(sent - requests)},
		{"caddy_kv_router_retries_denied_total", []string{`pool="poor"`}, float64(2*requests - sent)},
		{requestsTotal, []string{`pool="poor"`, `outcome="engine_error"`}, requests},
	})
	equal(t, len(s.conditions(t, "retry budget spent")), 1, "log lines that the budget is spent")
	s.booksAtZero(t)
}

// TestRefusedConnectionsAreFree has one of two engines down, and a retry budget of
// nothing.
func TestRefusedConnectionsAreFree(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "pool free", "retry_budget 0% 0/s", "policy round_robin"))
	refused := func() float64 { return s.scrape(t).value(retriesTotal, `pool="free"`, `reason="refused"`) }
	before := refused()
	eventually(t, "connections to be refused", func() bool { // a look at the worker may be sooner than the requests
		eventually(t, "the worker to be known", func() bool {
			up, known := s.available(t, engines[0].Addr())
			return known && up == 1
		})
		engines[0].Kill()
		for _, a := range s.together(t) {
			if !a.ok() {
				t.Errorf("status %d, error %v, body %q", a.status, a.err, a.body)
			}
		}
		found := refused() > before
		revive(t, engines[0])
		return found
	})
	// What is charged cannot be paid for: the answer is the client's.
	engines[1].SetFault(canned.Fault{Kind: canned.Status, Status: http.StatusServiceUnavailable, Body: "{}"})
	eventually(t, "a refusal reaches a client", func() bool {
		return s.chat(t.Context(), ask("hi").streamed()).status == http.StatusServiceUnavailable
	})
	s.booksAtZero(t)
}

// cpuTime returns the processor time that this process has taken.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// goroutines ends the engines and their connections. It fails the test if many more
// goroutines are left than before the first request.
func goroutines(t *testing.T, s *server, engines []*canned.Engine, before int) {
	t.Helper()
	for _, e := range engines {
		e.Kill()
	}
	eventually(t, "goroutines as before", func() bool {
		s.client.CloseIdleConnections()
		return runtime.NumGoroutine() <= before+20
	})
}

// TestRetryMatchComesToAnEnd has the operator's retry_match match what the engines do. The
// last answer reaches the client, each engine is asked once at most, and gets the body.
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
			s := startCaddy(t, behindProxy(engines, "lb_retry_match {\n"+v.match+"\n}"))
			for _, e := range engines {
				if e.SetFault(v.fault); v.name == "Dead" {
					e.Kill()
				}
			}
			a := s.startChat(t, "anybody?").wait(t)
			if a.status != v.status || v.fault.Body != "" && string(a.body) != v.fault.Body {
				t.Errorf("status %d, error %v, body %q; want %d", a.status, a.err, a.body, v.status)
			}
			if n := engines[0].Requests() + engines[1].Requests(); n > 2 {
				t.Errorf("%d attempts, want one on each", n)
			}
			if v.name == "Status" { // only the operator wants this to be tried elsewhere
				engines[1].SetFault(canned.Fault{})
				for i := range 4 {
					if a := s.mustChat(t, ask(fmt.Sprint("again ", i))); a.engine() != "e2" {
						t.Errorf("answered by %q", a.engine())
					}
				}
			}
			s.booksAtZero(t)
		})
	}
}

// TestClientThatLeavesEndsTheRounds has clients leave while the only engine is away, and
// the operator lets requests be tried for longer, without a pause.
func TestClientThatLeavesEndsTheRounds(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, behindProxy(engines, "lb_try_duration 30s", "lb_try_interval 1ns"))
	engines[0].Kill()
	ctx, leave := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer leave()
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() { s.chat(ctx, ask("anybody?")) })
	}
	clients.Wait()
	eventually(t, "nobody turns in a loop", func() bool {
		before := cpuTime()
		time.Sleep(300 * time.Millisecond)
		return cpuTime()-before < 120*time.Millisecond
	})
	s.booksAtZero(t)
}
