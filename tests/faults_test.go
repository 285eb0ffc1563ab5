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

// tally counts what clients got.
type tally struct {
	served, cut atomic.Int64
	mu          sync.Mutex
	failed      []string
}

func (y *tally) add(a answer, streamed bool) {
	switch {
	case a.ok():
		y.served.Add(1)
	case streamed && a.status == http.StatusOK:
		y.cut.Add(1)
	default:
		y.mu.Lock()
		defer y.mu.Unlock()
		y.failed = append(y.failed, fmt.Sprintf("status %d, error %v, body %.200q", a.status, a.err, a.body))
	}
}

// bond is one client's session and who answered it when.
type bond struct {
	mu   sync.Mutex
	last string
	when time.Time
}

func (b *bond) set(engine string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last, b.when = engine, time.Now()
}

func (b *bond) get() (string, time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.last, b.when
}

// TestNoRequestFailsWhileEnginesDo runs 16 clients against four engines. The
// first is killed at 1.5 s and comes back at 3.5 s. From 0.5 s on the second
// closes each connection after reading its request, and the third answers 503.
// Streams that the kill cuts after their header cannot be saved.
func TestNoRequestFailsWhileEnginesDo(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 8 s")
	}
	engines := startEngines(t, 4, canned.Pace{FirstToken: 15 * time.Millisecond, PerWord: 500 * time.Microsecond})
	s := startCaddy(t, route(engines))
	start := time.Now()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()

	var got tally
	bonds := make([]bond, 8)
	var clients sync.WaitGroup
	for i := range 16 {
		clients.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				c := ask(fmt.Sprintf("client %d, request %d: %s", i, n/4, strings.Repeat("why? ", 40)))
				c.Stream = (i+n)%3 == 0
				var header []string
				if i < len(bonds) {
					id := fmt.Sprintf("session-%d", i)
					c.Nvext = fmt.Appendf(nil, `{"session_control":{"session_id":%q}}`, id)
					header = []string{"X-Session-Id", id}
				}
				a := s.chat(t.Context(), c, header...)
				got.add(a, c.Stream)
				if i < len(bonds) && a.ok() {
					bonds[i].set(a.engine())
				}
			}
		})
	}
	at := func(d time.Duration) { time.Sleep(time.Until(start.Add(d))) }

	at(500 * time.Millisecond)
	bound := s.scrape(t).value(sessions)
	elsewhere := 0
	for i := range bonds {
		if e, _ := bonds[i].get(); e != "e4" {
			elsewhere++
		}
	}
	engines[1].SetFault(canned.Fault{Kind: canned.CloseAfterRead})
	engines[2].SetFault(canned.Fault{Kind: canned.Status, Status: http.StatusServiceUnavailable, Body: `{"error":{"message":"full"}}`})
	at(1500 * time.Millisecond)
	engines[0].Kill()
	at(3400 * time.Millisecond)
	for i := range bonds {
		if e, when := bonds[i].get(); e != "e4" || time.Since(when) > time.Second {
			t.Errorf("session %d was last answered by %q, %v ago; only e4 works", i, e, time.Since(when).Round(time.Millisecond))
		}
	}
	at(3500 * time.Millisecond)
	before := engines[0].Requests()
	if err := engines[0].Restart(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 4*time.Second, "the restarted engine is used again", func() bool { return engines[0].Requests() > before })
	t.Logf("the restarted engine was used after %v", time.Since(start.Add(3500*time.Millisecond)).Round(time.Millisecond))
	if time.Since(start) < 6*time.Second {
		at(6 * time.Second)
	}
	stop()
	clients.Wait()

	counts, _ := spread(engines)
	t.Logf("%d served, %d streams cut, %d failed; %v sessions at 0.5 s, %d of them not on e4; requests at the engines %v, retries %v",
		got.served.Load(), got.cut.Load(), len(got.failed), bound, elsewhere, counts, s.scrape(t).value(retriesTotal))
	if len(got.failed) > 0 {
		t.Errorf("%d requests failed, the first with %s", len(got.failed), got.failed[0])
	}
	if cut := got.cut.Load(); cut > 16 {
		t.Errorf("%d streams were cut, more than were under way when the engine was killed", cut)
	}
	if elsewhere == 0 {
		t.Error("no session was bound to an engine that fails")
	}
	if bound != float64(len(bonds)) {
		t.Errorf("%v sessions were bound before the faults, want %d", bound, len(bonds))
	}
	s.booksAtZero(t)
}

// TestLoneEngineGoesOnAfterAFailure has a pool of one engine, which fails once.
// A mark on it must not keep the next request away.
func TestLoneEngineGoesOnAfterAFailure(t *testing.T) {
	for _, f := range []struct {
		name  string
		fault canned.Fault
	}{
		{"ClosesConnection", canned.Fault{Kind: canned.CloseAfterRead}},
		{"ResetsConnection", canned.Fault{Kind: canned.ResetAfterRead}},
		{"Answers503", canned.Fault{Kind: canned.Status, Status: 503, Body: `{}`}},
		{"Answers429", canned.Fault{Kind: canned.Status, Status: 429, Body: `{}`}},
		{"DiesInMidAnswer", canned.Fault{Kind: canned.DieMidStream, Words: 2}},
	} {
		t.Run(f.name, func(t *testing.T) {
			engines := startEngines(t, 1, canned.Pace{})
			s := startCaddy(t, route(engines))
			s.mustChat(t, ask("before"))
			engines[0].FailNext(1, f.fault)
			a := s.chat(t.Context(), ask("the one that may fail"))
			t.Logf("the failing request: status %d, error %v", a.status, a.err)
			s.mustChat(t, ask("after"))
			s.booksAtZero(t)
		})
	}
	t.Run("Restarts", func(t *testing.T) {
		engines := startEngines(t, 1, canned.Pace{})
		s := startCaddy(t, route(engines))
		s.mustChat(t, ask("before"))
		engines[0].Kill()
		for i := range 3 {
			if a := s.chat(t.Context(), ask("nobody there")); a.status < 500 {
				t.Errorf("request %d without an engine: status %d, error %v", i, a.status, a.err)
			}
		}
		if err := engines[0].Restart(); err != nil {
			t.Fatal(err)
		}
		s.mustChat(t, ask("after"))
		s.booksAtZero(t)
	})
}

// TestStreamThatBreaksIsNotCompleted lets an engine die in mid-stream: the
// client must see that the answer is broken, and its words up to there.
func TestStreamThatBreaksIsNotCompleted(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{Words: 10})
	s := startCaddy(t, route(engines))
	for _, e := range engines {
		e.SetFault(canned.Fault{Kind: canned.DieMidStream, Words: 4})
	}
	c := ask("tell me").streamed()
	a := s.chat(t.Context(), c)
	if a.status != http.StatusOK || a.err == nil || strings.Contains(string(a.body), "[DONE]") {
		t.Errorf("status %d, error %v, body %q; want 200, an unexpected end and no [DONE]", a.status, a.err, a.body)
	}
	if want := strings.Join(canned.Words(c.body(), 10)[:4], " "); a.text != want {
		t.Errorf("got the words %q, want %q", a.text, want)
	}
	if n := strings.Count(string(a.body), `"error"`); n != 1 {
		t.Errorf("%d error events in %q, want 1", n, a.body)
	}
	if n := engines[0].Requests() + engines[1].Requests(); n != 1 {
		t.Errorf("the engines were sent %d requests, want 1: a stream that has begun cannot be retried", n)
	}
	s.booksAtZero(t)
}
