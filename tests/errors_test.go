package tests

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// wantAnswer checks that an answer is an engine's own, whole.
func wantAnswer(t *testing.T, a answer, f canned.Fault) {
	t.Helper()
	if a.status != f.Status || a.err != nil {
		t.Errorf("status %d, error %v; want %d", a.status, a.err, f.Status)
	}
	if string(a.body) != f.Body {
		t.Errorf("body %q, want %q", a.body, f.Body)
	}
	for name, values := range f.Header {
		if got := a.header.Values(name); len(got) != len(values) || got[0] != values[0] {
			t.Errorf("header %s: %q, want %q", name, got, values)
		}
	}
	if a.engine() == "" {
		t.Error("the engine's own header is missing")
	}
}

// TestEngineThatHangsUpLosesNoRequest has engines that close idle connections,
// as uvicorn does when its timeout runs out. The proxy writes requests into
// connections that are closed already, or just then.
func TestEngineThatHangsUpLosesNoRequest(t *testing.T) {
	for _, v := range []struct {
		name    string
		engines int
		when    canned.HangUp
	}{
		{"OneEngine/AfterAnswer", 1, canned.AfterAnswer},
		{"OneEngine/AtNextRequest", 1, canned.AtNextRequest},
		{"FourEngines/AfterAnswer", 4, canned.AfterAnswer},
		{"FourEngines/AtNextRequest", 4, canned.AtNextRequest},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, v.engines, canned.Pace{FirstToken: time.Millisecond})
			for _, e := range engines {
				e.SetHangUp(v.when)
			}
			s := startCaddy(t, route(engines))
			before := s.scrape(t)
			done := make(chan answer)
			for range 4 {
				go func() {
					for range 100 {
						done <- s.chat(t.Context(), ask("again"))
					}
				}()
			}
			failed := 0
			for range 400 {
				if a := <-done; !a.ok() {
					if failed++; failed == 1 {
						t.Errorf("status %d, error %v, body %.200q", a.status, a.err, a.body)
					}
				}
			}
			m := s.scrape(t)
			again := func(labels ...string) float64 {
				return m.value(retriesTotal, labels...) - before.value(retriesTotal, labels...)
			}
			t.Logf("%d of 400 requests failed; %v sent again, %v of them by net/http", failed, again(), again(`reason="resend"`))
			s.booksAtZero(t)
		})
	}
}
