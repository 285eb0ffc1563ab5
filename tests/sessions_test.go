package tests

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// controlled is a turn of a session whose client controls the session.
func controlled(text, control string) chat {
	c := ask(text)
	c.Nvext = fmt.Appendf(nil, `{"session_control":{"session_id":"s"%s}}`, control)
	return c
}

// TestClientsEndTheirSessions has last turns. The session's worker serves them, and then
// the router forgets the session, whatever its model.
func TestClientsEndTheirSessions(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "response_headers X-KV-", affinity("hard")))
	home := s.mustChat(t, controlled("one", "")).engine()
	for _, action := range []string{"", `,"action":"bind"`, `,"action":"close"`} {
		a := s.mustChat(t, controlled("text of its own"+action, action))
		if a.engine() != home || a.header.Get("X-KV-Reason") != "session" {
			t.Errorf("%s: served by %s, reason %q, the session is on %s", action, a.engine(), a.header.Get("X-KV-Reason"), home)
		}
	}
	eventually(t, "the session to be forgotten", func() bool { return s.scrape(t).value(sessions) == 0 })

	s.mustChat(t, controlled("never seen", `,"action":"close"`))
	if n := s.scrape(t).value(sessions); n != 0 {
		t.Errorf("%v sessions after the last turn of one that was not known", n)
	}
	s.mustChat(t, controlled("once more", `,"action":"bind"`))
	if n := s.scrape(t).value(sessions); n != 1 {
		t.Errorf("%v sessions after the first turn of one", n)
	}
}

// TestClientsSayHowLongSessionsAreKept requests lifetimes of sessions. The router keeps
// them within the operator's bounds. Each turn can change its session's lifetime.
func TestClientsSayHowLongSessionsAreKept(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "affinity {\nttl 10m\n}"))
	for _, c := range []struct {
		control string
		want    time.Duration
	}{
		{"", 10 * time.Minute},
		{`,"timeout":60`, time.Minute},
		{"", time.Minute},
		{`,"timeout":99999999,"action":"bind"`, time.Hour},
		{`,"timeout":0`, time.Second},
	} {
		s.mustChat(t, controlled("hello", c.control))
		got := s.sessionLeft(t)
		if got > c.want || got < c.want-30*time.Second {
			t.Errorf("%s: kept for %v, want %v", c.control, got, c.want)
		}
	}
	eventually(t, "the session to lapse", func() bool { return s.sessionLeft(t) <= 0 })
}

// TestMovedSessionsAreKeptAsLong kills the worker of a session. The next turn moves the
// session and names no lifetime: it stays the same.
func TestMovedSessionsAreKeptAsLong(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "affinity {\nttl 10m\n}"))
	home := s.mustChat(t, controlled("one", `,"timeout":1800`)).engine()
	for _, e := range engines {
		if e.Name() == home {
			e.Kill()
		}
	}
	if a := s.mustChat(t, controlled("two", "")); a.engine() == home {
		t.Fatal("it was served by an engine that is gone")
	}
	if got := s.sessionLeft(t); got < 25*time.Minute {
		t.Errorf("after its worker has died it is kept for %v, want 30m", got)
	}
}

// sessionLeft returns the remaining lifetime of a session, 0 if it has ended.
func (s *server) sessionLeft(t *testing.T) time.Duration {
	t.Helper()
	status, text := s.api(t, http.MethodGet, defaultPool+"/sessions/s?model=canned", nil, nil)
	if status == http.StatusNotFound {
		return 0
	}
	var one adminSession
	if err := json.Unmarshal([]byte(text), &one); err != nil || !one.Bound {
		t.Fatalf("status %d, %v: %s", status, err, text)
	}
	return time.Duration(one.Expires * float64(time.Second))
}

// TestSessionsAreRecognizedByDefault has a session key in each place that the router reads
// by default, and in one that it does not read.
func TestSessionsAreRecognizedByDefault(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines))
	body := func(member string) []byte {
		return []byte(`{"model":"m",` + member + `"messages":[{"role":"user","content":"hello"}]}`)
	}
	known := 0.0
	for _, v := range []struct {
		place, member string
		header        []string
		isNew         bool
	}{
		{"session_control", `"nvext":{"session_control":{"session_id":"a"}},`, []string{"X-Session-Id", "other"}, true},
		{"X-Dynamo-Session-Id", "", []string{"X-Dynamo-Session-Id", "b", "X-Claude-Code-Session-Id", "other"}, true},
		{"X-Claude-Code-Session-Id", "", []string{"X-Claude-Code-Session-Id", "c", "X-Session-Id", "other"}, true},
		{"Thread-Id", "", []string{"Thread-Id", "g", "X-Session-Id", "other"}, true},
		{"X-Deepseek-Harness-Session-Id", "", []string{"X-Deepseek-Harness-Session-Id", "h", "X-Session-Id", "other"}, true},
		{"X-Session-Id", `"prompt_cache_key":"other",`, []string{"X-Session-Id", "d"}, true},
		{"prompt_cache_key", `"prompt_cache_key":"e",`, nil, true},
		{"the same key elsewhere", "", []string{"X-Session-Id", "a"}, false},
		{"session_id", `"session_id":"f",`, nil, false},
		{"request and trace ids", "", []string{"X-Request-Id", "i", "Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}, false},
		{"nowhere", "", nil, false},
	} {
		if a := s.post(t.Context(), "/v1/chat/completions", body(v.member), v.header...); !a.ok() {
			t.Fatalf("%s: status %d, error %v", v.place, a.status, a.err)
		}
		if v.isNew {
			known++
		}
		eventually(t, fmt.Sprintf("%v sessions after %s", known, v.place), func() bool { return s.scrape(t).value(sessions) == known })
	}
}

// TestSessionsThatClientsOpen has clients open sessions in SGLang themselves, and send their
// turns two at a time.
func TestSessionsThatClientsOpen(t *testing.T) {
	for name, block := range map[string]string{"default": "", "off": affinity("off"), "another key": "affinity {\nkey header:X-Mine\n}", "full": maxRunning(1)} {
		t.Run(name, func(t *testing.T) {
			engines := holders(t, 2, engine.Config{})
			s := startHolding(t, engines, block)
			var sessions sync.WaitGroup
			one := func(i int) {
				id := fmt.Sprintf("mine-%d", i)
				opened := s.post(t.Context(), "/open_session", fmt.Appendf(nil, `{"capacity_of_str_len":65536,"session_id":%q,"streaming":true}`, id))
				if opened.status != http.StatusOK {
					t.Errorf("open: status %d, body %q", opened.status, opened.body)
				}
				home := opened.header.Get(canned.EngineHeader)
				var turns sync.WaitGroup
				for turn := range 4 {
					turns.Go(func() {
						body := fmt.Appendf(nil, `{"text":"words of turn %d, which are new","sampling_params":{"max_new_tokens":4},"session_params":{"id":%q}}`, turn, id)
						if a := s.post(t.Context(), atGenerate, body); a.status != http.StatusOK || a.engine() != home {
							t.Errorf("%s: a turn got status %d by %s, opened by %s: %q", block, a.status, a.engine(), home, a.body)
						}
					})
				}
				turns.Wait()
				if a := s.post(t.Context(), "/close_session", fmt.Appendf(nil, `{"session_id":%q}`, id)); a.status != http.StatusOK || a.engine() != home {
					t.Errorf("%s: closed with status %d by %s, opened by %s", block, a.status, a.engine(), home)
				}
			}
			for i := range 6 {
				sessions.Go(func() { one(i) })
			}
			sessions.Wait()
			for _, e := range engines { // the turns are no prompts
				if v, _ := s.scrape(t).sum("caddy_kv_router_worker_cached_tokens", `worker="`+e.Addr()+`"`); v != 0 {
					t.Errorf("%s: the model holds %v tokens", block, v)
				}
			}
			if n := s.pool(t).Sessions; n != 0 {
				t.Errorf("%s: %d sessions are left", block, n)
			}
			s.booksAtZero(t)
		})
	}
}

// TestFirstRequestsOfASessionGoToOneWorker has many first requests of a session come at once,
// with a policy that spreads them. An engine that streams answers at once; one that does not
// answers later than any request waits for another.
func TestFirstRequestsOfASessionGoToOneWorker(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{FirstToken: 300 * time.Millisecond})
	s := startCaddy(t, route(engines, "policy round_robin", "response_headers X-KV-", affinity("hard")))
	for round := range 8 {
		c := ask(fmt.Sprintf("text of round %d", round))
		if round%2 == 0 {
			c = c.streamed()
		}
		key := fmt.Sprint("session-", round)
		answers := make([]answer, 16)
		var wg sync.WaitGroup
		for i := range answers {
			wg.Go(func() { answers[i] = s.chat(t.Context(), c, "X-Session-Id", key) })
		}
		wg.Wait()
		states := make(map[string]int)
		for _, a := range answers {
			states[a.header.Get("X-KV-Session-State")]++
			if !a.ok() || a.engine() != answers[0].engine() {
				t.Fatalf("round %d: served by %s and %s, status %d, %v", round, answers[0].engine(), a.engine(), a.status, a.err)
			}
		}
		if states["new"] != 1 || states["bound"] != len(answers)-1 {
			t.Errorf("round %d: the answers show the states %v", round, states)
		}
	}
	if n := s.scrape(t).value(sessions); n != 8 {
		t.Errorf("%v sessions are bound, want 8", n)
	}
}
