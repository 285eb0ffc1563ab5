package tests

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// drain drains or undrains an engine's worker.
func (s *server) drain(t testing.TB, e *canned.Engine, verb string) adminWorker {
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
	if w := s.drain(t, drained, "drain"); !w.Draining || w.Load.Requests == 0 {
		t.Errorf("after drain: %+v", w)
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
	if err := s.load(route(engines, fmt.Sprintf("worker %s {\nid 77\n}", drained.Addr()))); err != nil {
		t.Fatal(err)
	}
	still("after a reload that gives it another id")
	if w := s.drain(t, drained, "undrain"); w.Draining {
		t.Errorf("after undrain: %+v", w)
	}
	// sessions stay where they are now: new ones come back
	eventually(t, "requests on the worker", func() bool { return drained.Requests() > asked })
	l.stop()
	last, moved := make(map[string]string), 0
	for _, v := range l.all() {
		if v.fate != served {
			t.Errorf("a request %v: by %q, status %d, error %v, body %.200q", v.fate, v.engine, v.status, v.err, v.body)
		}
		if v.session != "" && last[v.session] == drained.Name() && v.engine != drained.Name() {
			moved++
		}
		last[v.session] = v.engine
	}
	if moved == 0 {
		t.Error("no session moved")
	}
	s.booksAtZero(t)
}

// TestAllDraining drains every worker. They still serve requests, the log and the API say
// so, and other requests find the one that is left.
func TestAllDraining(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines))
	s.drain(t, engines[0], "drain")
	for i := range 10 {
		if a := s.mustChat(t, ask(fmt.Sprint(i))); a.engine() != engines[1].Name() {
			t.Errorf("request %d went to %s", i, a.engine())
		}
		if status, _, err := s.get(t.Context(), s.url+"/health"); err != nil || status == http.StatusBadGateway {
			t.Errorf("status %d, error %v", status, err)
		}
	}
	if n := engines[0].Requests(); n != 0 {
		t.Errorf("the drained worker was asked %d times", n)
	}
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
	if n := s.logged(t, "only draining workers are left"); n != 1 {
		t.Errorf("%d log lines say so, want 1", n)
	}
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
	drains := route(engines, fmt.Sprintf("worker %s {\ndrain\n}", engines[0].Addr()))
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
	if err := s.load(route(engines) + rejected); err == nil {
		t.Fatal("the broken config was accepted")
	}
	use("after a rejected reload", false)
	s.mustReload(t, route(engines))
	use("no longer drained", true)
	s.drain(t, engines[0], "drain")
	for _, site := range []string{route(engines, "max_body 1MiB"), drains, route(engines)} {
		s.mustReload(t, site)
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
