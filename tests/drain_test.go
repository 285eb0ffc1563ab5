package tests

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// drain drains the worker that an engine is, or ends that.
func (s *server) drain(t testing.TB, e *canned.Engine, verb string) adminWorker {
	t.Helper()
	var w adminWorker
	s.api(t, http.MethodPost, defaultPool+"/workers/"+e.Addr()+"/"+verb, nil, &w)
	return w
}

// TestDrainUnderLoad drains one of three workers while 32 clients stream, with
// sessions, and undrains it again. Its requests must end there and nothing new
// may come, even after a rejected reload and a good one. No request may fail.
func TestDrainUnderLoad(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{Words: 20, PerWord: 10 * time.Millisecond})
	s := startCaddy(t, route(engines, affinity("hard")))
	s.client.Transport.(*http.Transport).DisableKeepAlives = true // a reload closes idle connections
	drained := engines[0]
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var onDrained, moved, sent atomic.Int64
	var clients sync.WaitGroup
	for i := range 32 {
		clients.Go(func() {
			key, last := fmt.Sprintf("client-%d", i), ""
			for n := 0; ctx.Err() == nil; n++ {
				c := ask(fmt.Sprintf("client %d, turn %d", i, n)).streamed()
				a := s.chat(t.Context(), c, "X-Session-Id", key)
				for try := 0; a.status == 0 && try < 5; try++ { // Caddy closed its listener
					a = s.chat(t.Context(), c, "X-Session-Id", key)
				}
				sent.Add(1)
				if !a.ok() || len(strings.Fields(a.text)) != 20 {
					t.Errorf("%s: status %d, error %v, %d words", key, a.status, a.err, len(strings.Fields(a.text)))
					continue
				}
				if last == drained.Name() && a.engine() != last {
					moved.Add(1)
				}
				if last = a.engine(); last == drained.Name() {
					onDrained.Add(1)
				}
			}
		})
	}
	eventually(t, 10*time.Second, "load on the worker", func() bool { return onDrained.Load() >= 20 && s.worker(t, drained).Load.Requests > 3 })
	if w := s.drain(t, drained, "drain"); !w.Draining || w.Load.Requests == 0 {
		t.Errorf("after drain: %+v", w)
	}
	// a request may have been chosen for it just before
	eventually(t, 10*time.Second, "the worker to be idle", func() bool { return s.worker(t, drained).Load.Requests == 0 })
	more := func(n int64) {
		at := sent.Load()
		eventually(t, 30*time.Second, "further requests", func() bool { return sent.Load() >= at+n })
	}
	more(32)
	asked := drained.Requests()
	if err := s.load(route(engines, "worker * {\nkv_tokens 5000\n}") + rejected); err == nil {
		t.Fatal("the broken config was accepted")
	}
	still := func(when string) {
		more(100)
		if w := s.worker(t, drained); !w.Draining || w.Load.Requests != 0 || drained.Requests() != asked {
			t.Errorf("%s: %d new requests, %+v", when, drained.Requests()-asked, w)
		}
	}
	still("after a rejected reload")
	if err := s.load(route(engines, fmt.Sprintf("worker %s {\nid 77\n}", drained.Addr()))); err != nil {
		t.Fatal(err)
	}
	still("after a reload that gives it another id")
	if moved.Load() == 0 {
		t.Error("no session moved")
	}
	was := onDrained.Load()
	if w := s.drain(t, drained, "undrain"); w.Draining {
		t.Errorf("after undrain: %+v", w)
	}
	// sessions stay where they are now: new ones come back
	eventually(t, 10*time.Second, "requests on the worker", func() bool {
		s.mustChat(t, ask("anything new?"))
		return drained.Requests() > asked
	})
	stop()
	clients.Wait()
	t.Logf("%d requests, %d of them on the drained worker (%d before it was undrained), %d sessions moved", sent.Load(), onDrained.Load(), was, moved.Load())
	s.booksAtZero(t)
}

// TestAllDraining drains every worker. Requests are served all the same, the
// log and the API say so, and passing requests find the one that is left.
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
	if n := s.logged(t, "no worker left but draining ones"); n != 1 {
		t.Errorf("%d log lines say so, want 1", n)
	}
	if p := s.pool(t); p.Draining != 2 || len(p.Incidents) != 1 || !strings.Contains(p.Incidents[0].What, "draining") {
		t.Errorf("the pool is %+v", p)
	}
	if x := s.explain(t, ask("hello").body()); len(x.Candidates) != 2 || !strings.Contains(x.Chosen.Why, "draining") {
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

// TestDrainByConfig drains a worker in the configuration: only that ends it.
func TestDrainByConfig(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	drains := route(engines, fmt.Sprintf("worker %s {\ndrain\n}", engines[0].Addr()))
	s := startCaddy(t, drains)
	use := func(when string, want bool) {
		t.Helper()
		before := engines[0].Requests()
		for i := range 6 {
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
	if err := s.reload(route(engines)); err != nil {
		t.Fatal(err)
	}
	use("not drained any more", true)
	s.drain(t, engines[0], "drain")
	for _, site := range []string{route(engines, "max_body 1MiB"), drains, route(engines)} {
		if err := s.reload(site); err != nil {
			t.Fatal(err)
		}
		use("drained by the API", false)
	}
	s.drain(t, engines[0], "undrain")
	use("undrained", true)
}
