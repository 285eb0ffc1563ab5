package tests

import (
	"net/http"
	"strconv"
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

// TestErrorAnswersReachTheClientWhole covers the errors that are the request's
// fault, or that no worker can serve. They are the engine's answer, and come
// with its header and body. Only what another engine may serve is tried there.
func TestErrorAnswersReachTheClientWhole(t *testing.T) {
	for _, v := range []struct {
		status  int
		header  http.Header
		retried bool
	}{
		{400, http.Header{"X-Request-Id": {"r-400"}}, false},
		{401, http.Header{"Www-Authenticate": {"Bearer"}}, false},
		{404, http.Header{"X-Request-Id": {"r-404"}}, false},
		{422, http.Header{"Content-Type": {"application/problem+json"}}, false},
		{500, http.Header{"X-Request-Id": {"r-500"}}, false},
		{429, http.Header{"Retry-After": {"7"}, "X-Ratelimit-Remaining": {"0"}}, true},
		{503, http.Header{"Retry-After": {"2"}}, true},
		{529, http.Header{"Retry-After": {"3"}}, true},
	} {
		for _, stream := range []bool{false, true} {
			name := strconv.Itoa(v.status)
			if stream {
				name += "/Streamed"
			}
			t.Run(name, func(t *testing.T) {
				engines := startEngines(t, 4, canned.Pace{})
				s := startCaddy(t, route(engines))
				f := canned.Fault{
					Kind: canned.Status, Status: v.status, Header: v.header,
					Body: `{"error": {"message": "no – not so", "type": "some_error", "param": null, "code": ` + strconv.Itoa(v.status) + "}}\n",
				}
				for _, e := range engines {
					e.SetFault(f)
				}
				c := ask("what?")
				c.Stream = stream
				wantAnswer(t, s.chat(t.Context(), c), f)
				counts, _ := spread(engines)
				total := 0
				for _, n := range counts {
					total += n
				}
				switch {
				case !v.retried && total != 1:
					t.Errorf("requests at the engines %v, want 1 in all", counts)
				case v.retried && total < 2:
					t.Errorf("requests at the engines %v, want that others were tried", counts)
				}
				s.booksAtZero(t)
			})
		}
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
