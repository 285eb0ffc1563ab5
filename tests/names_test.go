package tests

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestNameServerThatFails takes the name of one of two engines away. Its
// requests go to the other one, free of charge. When the name is back, the
// engine has lost nothing of its cache.
func TestNameServerThatFails(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	for _, e := range engines {
		e.SetHangUp(canned.AfterAnswer) // so that each request looks up the name
	}
	names := startDNS(t)
	names.setA("engine.test", loopback(0))
	_, port, err := net.SplitHostPort(engines[0].Addr())
	if err != nil {
		t.Fatal(err)
	}
	named := "engine.test:" + port
	s := startCaddy(t, "kv_router {\npool named\npolicy round_robin\nretry_budget 0% 0/s\nreverse_proxy "+named+" "+engines[1].Addr()+
		" {\ntransport http {\nresolvers udp/"+names.addr+"\n}\n}\n}")
	before := s.scrape(t)
	for n := 0; s.mustChat(t, ask(strings.Repeat("some words ", 300+n)).streamed()).engine() != "e1"; n++ {
		if n > 20 {
			t.Fatal("the engine with a name gets no requests")
		}
	}
	s.booksAtZero(t)

	names.close()
	was := engines[0].Requests()
	for _, a := range s.together(t) {
		if !a.ok() || a.engine() != "e2" {
			t.Errorf("status %d, error %v, by %q, body %q; want e2's answer", a.status, a.err, a.engine(), a.body)
		}
	}
	if n := engines[0].Requests() - was; n != 0 {
		t.Errorf("%d requests reached an engine whose name is not known", n)
	}
	m := s.scrape(t)
	if n := m.value(retriesTotal, `pool="named"`, `reason="refused"`) - before.value(retriesTotal, `pool="named"`, `reason="refused"`); n == 0 {
		t.Error("nothing was retried")
	}
	if n := s.logged(t, markedDown); n != 1 {
		t.Errorf("%d workers were marked down, want 1", n)
	}
	s.booksAtZero(t)
	if n := s.scrape(t).value("caddy_kv_router_worker_cached_tokens", `pool="named"`, `worker="`+named+`"`); n == 0 {
		t.Error("the cache model was cleared, though the engine is where it was")
	}

	startDNSAt(t, names.addr).setA("engine.test", loopback(0))
	was = engines[0].Requests()
	eventually(t, 10*time.Second, "the engine is used again", func() bool {
		s.mustChat(t, ask("is it back?").streamed())
		return engines[0].Requests() > was
	})
	s.booksAtZero(t)
}
