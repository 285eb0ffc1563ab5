package tests

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestNobodyIsTurnedAwayWhileAWorkerHasRoom has two engines. One is marked down
// and gets one trial request at a time; the other one is full. Requests that the
// queue would reject go to the first one, whether they have waited or cannot.
func TestNobodyIsTurnedAwayWhileAWorkerHasRoom(t *testing.T) {
	for name, queue := range map[string]string{"Late": "max_wait 300ms", "Overflow": "max_waiting 1\nmax_wait 20s"} {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, "policy round_robin", maxRunning(4), "queue {\n"+queue+"\n}"))
			engines[1].FailNext(1, refusal)
			for i := range 2 { // one of them meets the refusal
				s.mustChat(t, ask(fmt.Sprint("before ", i)))
			}
			gates := []*gate{holdInferences(engines[0]), holdInferences(engines[1])}
			time.Sleep(600 * time.Millisecond) // the mark is over, its window is not
			var all []asked
			for i := range 8 {
				all = append(all, s.startChat(t, fmt.Sprint("request ", i)))
				if i < 5 {
					eventually(t, 5*time.Second, "they have room", func() bool { return gates[0].running.Load()+gates[1].running.Load() == int64(i)+1 })
				}
			}
			eventually(t, 5*time.Second, "nobody is left with nothing", func() bool {
				return gates[0].running.Load()+gates[1].running.Load() >= 7
			})
			gates[0].opened(t)
			gates[1].opened(t)
			for i, q := range all {
				if a := q.wait(t); !a.ok() {
					t.Errorf("request %d: status %d, error %v, body %q", i, a.status, a.err, a.body)
				}
			}
			s.slotsFree(t)
		})
	}
}

// TestWorseWorkersAreNotThoseThatDrain has nothing left but the operator's wish.
func TestWorseWorkersAreNotThoseThatDrain(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1), "worker "+engines[1].Addr()+" {\ndrain\n}", "queue {\nmax_wait 300ms\n}"))
	g := holdInferences(engines[0])
	served := s.startChat(t, "one")
	runs(t, g, 1)
	wantTurnedAway(t, s.chat(t.Context(), ask("two")), http.StatusServiceUnavailable, "queue_timeout", "server_error")
	g.opened(t)
	if a := served.wait(t); !a.ok() {
		t.Errorf("status %d, error %v", a.status, a.err)
	}
	s.slotsFree(t)
}

// TestUploadsOvertakeNobody has a request whose body comes slowly, and others
// that wait meanwhile: it comes after them.
func TestUploadsOvertakeNobody(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1)))
	g := holdInferences(engines[0])
	conn := s.connect(t)
	body := ask("request slow").body()
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", s.addr, len(body), body[:10])
	time.Sleep(100 * time.Millisecond) // it has begun before them
	all := []asked{s.startChat(t, "request 0")}
	runs(t, g, 1)
	for i := 1; i < 4; i++ {
		all = append(all, s.startChat(t, fmt.Sprint("request ", i)))
		s.wantWaiting(t, i)
	}
	if _, err := conn.Write(body[10:]); err != nil {
		t.Fatal(err)
	}
	s.wantWaiting(t, 4)
	for range 5 {
		g.pass(t, http.StatusOK)
	}
	for i, q := range all {
		if a := q.wait(t); !a.ok() {
			t.Errorf("request %d: status %d, error %v", i, a.status, a.err)
		}
	}
	if _, err := io.ReadAtLeast(conn, make([]byte, 12), 12); err != nil {
		t.Error(err)
	}
	var order []string
	for _, r := range engines[0].Journal() {
		if _, rest, ok := strings.Cut(string(r.Body), "request "); ok {
			order = append(order, rest[:1])
		}
	}
	if got := strings.Join(order, ""); got != "0123s" {
		t.Errorf("served in the order %s", got)
	}
	s.slotsFree(t)
}

// TestSlowUploadsHoldNoSlot has clients that send the beginning of a body
// that is too long to be read, and then nothing.
func TestSlowUploadsHoldNoSlot(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(2), "max_body 1KiB", "queue {\nmax_wait 2s\n}"))
	for range 2 {
		conn := s.connect(t)
		fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 2000\r\n\r\nx", s.addr)
	}
	eventually(t, 5*time.Second, "both are at the engine", func() bool {
		n, _ := s.scrape(t).sum(workerRequests)
		return n == 2
	})
	s.mustChat(t, ask("hi"))
}

// TestHeldRefusalWaitsAsLongAsItSays has one engine refuse, and the other one full.
func TestHeldRefusalWaitsAsLongAsItSays(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "policy round_robin", maxRunning(1), "queue {\nmax_wait 20s\n}"))
	g := holdInferences(engines[0])
	f := canned.Fault{Kind: canned.Status, Status: 429, Body: `{"error":"slow down"}`, Header: http.Header{"Retry-After": {"1"}}}
	engines[1].SetFault(f)
	served := s.startChat(t, "one")
	runs(t, g, 1)
	begun := time.Now()
	wantAnswer(t, s.chat(t.Context(), ask("two")), f)
	if d := time.Since(begun); d > 8*time.Second {
		t.Errorf("the refusal came after %v", d)
	}
	g.opened(t)
	if a := served.wait(t); !a.ok() {
		t.Errorf("status %d, error %v", a.status, a.err)
	}
	s.slotsFree(t)
}

// TestOneSessionsErrorsMarkNobody has a client with a wrong key, and the id of
// another one's session: that stays where its cache is.
func TestOneSessionsErrorsMarkNobody(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{Words: 5})
	for _, e := range engines {
		e.SetHandler(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set(canned.EngineHeader, e.Name())
			if r.Header.Get("Authorization") != "Bearer good" {
				w.WriteHeader(http.StatusUnauthorized)
				io.WriteString(w, `{"error":"Unauthorized"}`)
				return
			}
			io.WriteString(w, wholeJSON)
		})
	}
	s := startCaddy(t, route(engines, affinity("hard")))
	prompt := strings.Repeat("You are the well known assistant of product X. ", 100)
	home := s.chat(t.Context(), ask(prompt), "Authorization", "Bearer good", "X-Session-Id", "theirs").engine()
	for i := range 20 {
		if a := s.chat(t.Context(), ask(fmt.Sprint(prompt, i)), "Authorization", "Bearer bad", "X-Session-Id", "theirs"); a.status != http.StatusUnauthorized {
			t.Fatalf("status %d", a.status)
		}
	}
	if n := s.logged(t, markedDown); n != 0 {
		t.Errorf("%d workers were marked down", n)
	}
	if e := s.chat(t.Context(), ask(prompt+"next"), "Authorization", "Bearer good", "X-Session-Id", "theirs").engine(); e != home {
		t.Errorf("the session moved from %q to %q", home, e)
	}
}

// TestStreamsOfOtherShapesAreNotLate has engines whose tokens cannot be read, and
// that send them in time.
func TestStreamsOfOtherShapesAreNotLate(t *testing.T) {
	for _, event := range []string{
		`{"id":"x","choices":[{"index":0,"delta":{"reasoning_text":"word"}}]}`,
		`{"token":{"text":"word"}}`, `{"content":"word"}`, `{"message":{"content":"word"}}`,
	} {
		engines := startEngines(t, 1, canned.Pace{})
		engines[0].SetHandler(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range 20 {
				if r.Context().Err() != nil {
					return
				}
				fmt.Fprintf(w, "data: %s\n\n", event)
				http.NewResponseController(w).Flush()
				time.Sleep(50 * time.Millisecond)
			}
			io.WriteString(w, "data: [DONE]\n\n")
		})
		s := startCaddy(t, route(engines, "timeouts {\nfirst_token 700ms\n}"))
		if a := s.chat(t.Context(), ask("x").streamed()); a.status != http.StatusOK || !strings.HasSuffix(string(a.body), "data: [DONE]\n\n") {
			t.Errorf("%s: status %d, error %v, body %.200q", event, a.status, a.err, a.body)
		}
	}
}

// TestLegibleAnswersOfOtherWritings are of engines that write the content type or
// the beginning in another way: they are not ill.
func TestLegibleAnswersOfOtherWritings(t *testing.T) {
	for name, v := range map[string][2]string{
		"capitals": {"Text/Event-Stream; charset=utf-8", oneChunk + "data: [DONE]\n\n"},
		"bom":      {"application/json", "\xef\xbb\xbf" + wholeJSON},
		"no type":  {"", "plain words"},
	} {
		engines := startEngines(t, 2, canned.Pace{})
		s := startCaddy(t, route(engines, "policy round_robin"))
		engines[0].SetHandler(func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Content-Type"] = nil
			if v[0] != "" {
				w.Header().Set("Content-Type", v[0])
			}
			io.WriteString(w, v[1])
		})
		for i := range 20 {
			s.chat(t.Context(), ask(fmt.Sprint("question ", i)).streamed())
		}
		if n := s.logged(t, markedDown); n != 0 {
			t.Errorf("%s: marked down", name)
		}
	}
}
