package tests

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// drain drains or undrains an engine's worker.
func (s *server) drain(t testing.TB, e interface{ Addr() string }, verb string) adminWorker {
	t.Helper()
	var w adminWorker
	s.api(t, http.MethodPost, defaultPool+"/workers/"+e.Addr()+"/"+verb, nil, &w)
	return w
}

// TestDrainUnderLoad drains one of three workers while 32 clients stream, with sessions,
// and undrains it again. Its requests must end there. It must get no new ones, even after
// a rejected reload and a good one. No request may fail.
func TestDrainUnderLoad(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{Words: 20, PerWord: 10 * time.Millisecond})
	s := startCaddy(t, route(engines, affinity("hard")))
	s.client.Transport.(*http.Transport).DisableKeepAlives = true // a reload closes idle connections
	drained := engines[0]
	l := &load{s: s, resends: 5}
	l.start(t.Context(), 32)
	eventually(t, "load on the worker", func() bool { return drained.Requests() >= 20 && s.worker(t, drained.Addr()).Load.Requests > 3 })
	session := ""
	eventually(t, "a session on the worker", func() bool {
		session += "s"
		return s.mustChat(t, ask("hello"), "X-Session-Id", session).engine() == drained.Name()
	})
	if w := s.drain(t, drained, "drain"); !w.Draining || w.Load.Requests == 0 {
		t.Errorf("after drain: %+v", w)
	}
	if s.mustChat(t, ask("again"), "X-Session-Id", session).engine() == drained.Name() {
		t.Error("a session stays at the worker that drains")
	}
	// a request may have been chosen for it just before
	eventually(t, "the worker to be idle", func() bool { return s.worker(t, drained.Addr()).Load.Requests == 0 })
	more := func(n int) {
		at := len(l.all())
		eventually(t, "further requests", func() bool { return len(l.all()) >= at+n })
	}
	more(32)
	asked := drained.Requests()
	still := func(when string) {
		more(100)
		if w := s.worker(t, drained.Addr()); !w.Draining || w.Load.Requests != 0 || drained.Requests() != asked {
			t.Errorf("%s: %d new requests, %+v", when, drained.Requests()-asked, w)
		}
	}
	if err := s.load(route(engines, "worker * {\nkv_tokens 5000\n}") + rejected); err == nil {
		t.Fatal("the broken config was accepted")
	}
	still("after a rejected reload")
	noError(t, s.load(route(engines, fmt.Sprintf("worker %s {\nid 77\n}", drained.Addr()))))
	still("after a reload that gives it another id")
	if w := s.drain(t, drained, "undrain"); w.Draining {
		t.Errorf("after undrain: %+v", w)
	}
	// sessions stay where they are now: new ones come back
	eventually(t, "requests on the worker", func() bool { return drained.Requests() > asked })
	l.stop()
	for _, v := range l.all() {
		if v.fate != served {
			t.Errorf("a request %v: by %q, status %d, error %v, body %.200q", v.fate, v.engine, v.status, v.err, v.body)
		}
	}
	s.booksAtZero(t)
}

// TestAllDraining drains every worker. They still serve requests, the log and the API say
// so, and other requests find the one that is left.
func TestAllDraining(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "policy round_robin")) // which avoids no worker
	s.drain(t, engines[0], "drain")
	for i := range 10 {
		if a := s.mustChat(t, ask(fmt.Sprint(i))); a.engine() != engines[1].Name() {
			t.Errorf("request %d went to %s", i, a.engine())
		}
		if status, _, err := s.get(t.Context(), s.url+"/health"); err != nil || status == http.StatusBadGateway {
			t.Errorf("status %d, error %v", status, err)
		}
	}
	equal(t, engines[0].Requests(), 0, "requests at the drained worker")
	x := s.explain(t, ask("hello").body())
	if len(x.LeftOut) != 1 || x.LeftOut[0].Why != "draining" || x.LeftOut[0].Dial != engines[0].Addr() || len(x.Candidates) != 1 {
		t.Errorf("explained %+v", x)
	}
	s.drain(t, engines[1], "drain")
	for i := range 10 {
		s.mustChat(t, ask(fmt.Sprint(i)))
	}
	if engines[0].Requests() == 0 {
		t.Error("with all draining, one is avoided still")
	}
	equal(t, s.logged(t, "only draining workers are left"), 1, "log lines that say so")
	if p := s.pool(t); p.Draining != 2 || len(p.Incidents) != 1 || !strings.Contains(p.Incidents[0].What, "draining") {
		t.Errorf("the pool is %+v", p)
	}
	if x := s.explain(t, ask("hello").body()); len(x.Candidates) != 2 || !strings.Contains(x.Chosen.Sentence, "draining") {
		t.Errorf("explained %+v", x.Chosen)
	}
	// the one that is not draining is dead: better a draining one than none
	s.drain(t, engines[1], "undrain")
	engines[1].Kill()
	for i := range 5 {
		if a := s.mustChat(t, ask(fmt.Sprint(i))); a.engine() != engines[0].Name() {
			t.Errorf("request %d went to %s", i, a.engine())
		}
	}
}

// TestDrainByConfig drains a worker in the configuration. Only the configuration ends
// that.
func TestDrainByConfig(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	site := func(block ...string) string { return route(engines, append(block, "policy round_robin")...) } // which avoids no worker
	drains := site(fmt.Sprintf("worker %s {\ndrain\n}", engines[0].Addr()))
	s := startCaddy(t, drains)
	use := func(when string, want bool) {
		t.Helper()
		before := engines[0].Requests()
		for i := range 20 {
			s.mustChat(t, ask(fmt.Sprint(when, i)))
		}
		if got := engines[0].Requests() > before; got != want {
			t.Errorf("%s: used %v, want %v", when, got, want)
		}
	}
	use("drained by the config", false)
	if status, text := s.api(t, http.MethodPost, defaultPool+"/workers/"+engines[0].Addr()+"/undrain", nil, nil); status != http.StatusConflict {
		t.Errorf("undrain: status %d, %s", status, text)
	}
	if err := s.load(site() + rejected); err == nil {
		t.Fatal("the broken config was accepted")
	}
	use("after a rejected reload", false)
	s.mustReload(t, site())
	use("no longer drained", true)
	s.drain(t, engines[0], "drain")
	for _, other := range []string{site("max_body 1MiB"), drains, site()} {
		s.mustReload(t, other)
		use("drained by the API", false)
	}
	s.drain(t, engines[0], "undrain")
	use("undrained", true)
}

// available returns what the metrics say of a worker, and whether they do.
func (s *server) available(t testing.TB, dial string) (float64, bool) {
	t.Helper()
	return s.scrape(t).sum("caddy_kv_router_worker_available", `worker="`+dial+`"`)
}

// startSleepers starts engines that sleep at a level, and a router before them that knows it.
func startSleepers(t *testing.T, n, level int, wakeTime time.Duration, block ...string) (*server, []*engine.Engine) {
	engines := startFleet(t, n, engine.Config{Model: "canned", WakeTime: wakeTime})
	s := startCaddy(t, ofEngines(engines, block...))
	for _, e := range engines {
		s.awaitType(t, e.Addr(), "vllm")
		putToSleep(t, s, e, level)
	}
	return s, engines
}

func postSleep(t *testing.T, e *engine.Engine, level int) {
	t.Helper()
	direct(e).post(t.Context(), fmt.Sprint(engine.SleepPath, "?level=", level), nil)
}

// putToSleep has an engine sleep, and waits until the router knows it.
func putToSleep(t *testing.T, s *server, e *engine.Engine, level int) {
	t.Helper()
	postSleep(t, e, level)
	eventually(t, "the router knows that the engine sleeps", func() bool {
		s.admits(t, e.Addr())
		return s.worker(t, e.Addr()).State == "asleep"
	})
}

// admits has the router ask an engine again, as a call of the admin API does.
func (s *server) admits(t *testing.T, dial string) {
	t.Helper()
	s.api(t, http.MethodPost, "/pools/default/call?path=/tokenize&worker="+dial, []byte(`{"model":"canned","prompt":"x"}`), nil)
}

// calls returns the calls by which the router woke an engine, in order.
func calls(e *engine.Engine) (list []string) {
	for _, r := range e.Journal() {
		if r.Path == engine.WakePath || r.Path == "/collective_rpc" {
			list = append(list, r.Path)
		}
	}
	return list
}

// TestAsleepGetsNothing has one of two engines sleep, then both, and then wakes one up.
func TestAsleepGetsNothing(t *testing.T) {
	s, engines := startSleepers(t, 1, 1, 0)
	if code, body := s.api(t, http.MethodGet, "/ready", nil, nil); code != http.StatusServiceUnavailable {
		t.Errorf("ready while none can be woken: %d %s", code, body)
	}
	if a := s.chat(t.Context(), ask("hello")); a.status != http.StatusServiceUnavailable {
		t.Errorf("while the engine sleeps: status %d: %s", a.status, a.body)
	}
	if n := len(calls(engines[0])); n > 0 {
		t.Errorf("the engine was woken %d times", n)
	}
	if code, _, err := s.get(t.Context(), s.url+"/v1/models"); code != http.StatusOK || len(s.conditions(t, "only draining")) > 0 {
		t.Errorf("a GET reaches it, and nothing drains: %d, %v", code, err)
	}
	direct(engines[0]).post(t.Context(), engine.WakePath, nil)
	eventually(t, "the router knows that it is awake", func() bool { return s.chat(t.Context(), ask("hello")).ok() })
	if n := held(engines[0]); n > 0 {
		t.Errorf("the engine got %d requests in its sleep", n)
	}
}

// held returns how many requests an engine got in its sleep.
func held(e *engine.Engine) (n int) {
	for _, r := range e.Journal() {
		if r.Held {
			n++
		}
	}
	return n
}

// TestStreamsLeaveEngineThatSleeps has an engine fall asleep before the router knows it. What it gets then goes to
// the other one.
func TestStreamsLeaveEngineThatSleeps(t *testing.T) {
	engines := []*engine.Engine{
		startSimulated(t, engine.Config{Name: "sleeper", Model: "canned"}), startSimulated(t, engine.Config{Name: "awake", Model: "canned"}),
	}
	s := startCaddy(t, ofEngines(engines))
	for _, e := range engines {
		s.awaitType(t, e.Addr(), "vllm")
	}
	asleep := make(chan struct{})
	setFault(t, engines[0], engine.Fault{Kind: engine.Hang, Until: asleep})
	s.drain(t, engines[1], "drain") // all go to the one that falls asleep
	all := make([]asked, 8)
	for i := range all {
		all[i] = s.start(t, "/v1/chat/completions", string(ask(fmt.Sprint("hello ", i)).streamed().body()))
	}
	eventually(t, "the engine has the requests", func() bool { n, _ := posts(engines[0]); return n == len(all) })
	s.drain(t, engines[1], "undrain")
	postSleep(t, engines[0], 1)
	close(asleep)
	s.admits(t, engines[0].Addr())
	for i, q := range all {
		if a := q.wait(t); !a.ok() || a.engine() != engines[1].Name() {
			t.Errorf("request %d: status %d by %s: %.200s", i, a.status, a.engine(), a.body)
		}
	}
	s.slotsFree(t)
}

// TestRequestsWakeOneEngine has many requests come while two engines sleep. One is woken, once, and serves
// all of them. The clients of streams get comments meanwhile.
func TestRequestsWakeOneEngine(t *testing.T) {
	for _, level := range []int{1, 2} {
		t.Run(fmt.Sprint("Level", level), func(t *testing.T) {
			s, engines := startSleepers(t, 2, level, 2*time.Second, "worker * {\nwake\n}", "keepalive 20ms")
			eventually(t, "the router is ready, as it can wake an engine", func() bool {
				code, _ := s.api(t, http.MethodGet, "/ready", nil, nil)
				return code == http.StatusOK
			})
			asked := make([]asked, 12)
			for i := range asked {
				c := ask(fmt.Sprint("hello ", i))
				c.Stream = i%2 == 0
				asked[i] = s.start(t, "/v1/chat/completions", string(c.body()))
			}
			for i, q := range asked {
				a := q.wait(t)
				if !a.ok() || i%2 == 0 && !strings.HasPrefix(string(a.body), ":") {
					t.Errorf("request %d: status %d, %v: %.200s", i, a.status, a.err, a.body)
				}
			}
			want := []string{engine.WakePath}
			if level == 2 {
				want = []string{engine.WakePath, "/collective_rpc", engine.WakePath}
			}
			woken := slices.Concat(calls(engines[0]), calls(engines[1]))
			if !slices.Equal(woken, want) || len(calls(engines[0]))*len(calls(engines[1])) > 0 {
				t.Errorf("woken by %v and %v", calls(engines[0]), calls(engines[1]))
			}
			s.slotsFree(t)
		})
	}
}

// TestEngineDiesWhileWaking kills the engine that is being woken. Another one is woken, and nobody notices.
func TestEngineDiesWhileWaking(t *testing.T) {
	s, engines := startSleepers(t, 2, 1, time.Second, "worker * {\nwake\n}")
	asked := make([]asked, 6)
	for i := range asked {
		asked[i] = s.startChat(t, fmt.Sprint("hello ", i))
	}
	var first, second *engine.Engine
	eventually(t, "an engine is woken", func() bool {
		for i, e := range engines {
			if len(calls(e)) > 0 {
				first, second = e, engines[1-i]
			}
		}
		return first != nil
	})
	first.Kill()
	for i, q := range asked {
		if a := q.wait(t); !a.ok() {
			t.Errorf("request %d: status %d, %v: %.200s", i, a.status, a.err, a.body)
		}
	}
	if len(calls(second)) != 1 {
		t.Errorf("the other engine was woken by %v", calls(second))
	}
	s.slotsFree(t)
}
