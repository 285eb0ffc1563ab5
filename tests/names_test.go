package tests

import (
	"bytes"
	"encoding/binary"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// nameServer answers questions for addresses with 127.0.0.1, until it is
// closed.
func nameServer(t *testing.T, addr string) (at string, closeIt func()) {
	t.Helper()
	conn, err := net.ListenPacket("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 512)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			end := 12 + bytes.IndexByte(buf[12:n], 0) + 5 // of the question: name, type, class
			if n < 12 || end > n {
				continue
			}
			answer := bytes.Clone(buf[:end])
			answer[2], answer[3] = 0x84, 0 // an answer, and authoritative
			clear(answer[6:12])
			if binary.BigEndian.Uint16(answer[end-4:]) == 1 {
				answer[7] = 1
				// the name asked for, type A, class IN, no time to live, four bytes
				answer = append(answer, 0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 127, 0, 0, 1)
			}
			conn.WriteTo(answer, from)
		}
	}()
	closeIt = func() {
		conn.Close()
		<-done
	}
	t.Cleanup(closeIt)
	return conn.LocalAddr().String(), closeIt
}

// TestNameServerThatFails takes the name of one of two engines away: its
// requests go to the other one, at no charge, and it has lost nothing of its
// cache when its name is back.
func TestNameServerThatFails(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	for _, e := range engines {
		e.SetHangUp(canned.AfterAnswer) // so that each request looks up the name
	}
	names, closeNames := nameServer(t, "127.0.0.1:0")
	_, port, err := net.SplitHostPort(engines[0].Addr())
	if err != nil {
		t.Fatal(err)
	}
	named := "engine.test:" + port
	s := startCaddy(t, "kv_router {\npool named\npolicy round_robin\nretry_budget 0% 0/s\nreverse_proxy "+named+" "+engines[1].Addr()+
		" {\ntransport http {\nresolvers udp/"+names+"\n}\n}\n}")
	before := s.scrape(t)
	for n := 0; s.mustChat(t, ask(strings.Repeat("some words ", 300+n)).streamed()).engine() != "e1"; n++ {
		if n > 20 {
			t.Fatal("the engine with a name gets no requests")
		}
	}
	s.booksAtZero(t)

	closeNames()
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
	if n := s.logged(t, ratedDown); n != 1 {
		t.Errorf("%d workers were rated down, want 1", n)
	}
	s.booksAtZero(t)
	if n := s.scrape(t).value("caddy_kv_router_worker_cached_tokens", `pool="named"`, `worker="`+named+`"`); n == 0 {
		t.Error("the mirror was cleared, though the engine is where it was")
	}

	nameServer(t, names)
	was = engines[0].Requests()
	eventually(t, 10*time.Second, "the engine is used again", func() bool {
		s.mustChat(t, ask("is it back?").streamed())
		return engines[0].Requests() > was
	})
	s.booksAtZero(t)
}
