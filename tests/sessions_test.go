package tests

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
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
	home := s.mustChat(t, controlled("hello", `,"timeout":1800`)).engine()
	engines[home[1]-'1'].Kill()
	if a := s.mustChat(t, controlled("hello", "")); a.engine() == home || s.sessionLeft(t) < 25*time.Minute {
		t.Errorf("after its worker has died it is kept for %v at %s, want 30m elsewhere", s.sessionLeft(t), a.engine())
	}
	s.mustChat(t, controlled("hello", `,"timeout":0`))
	eventually(t, "the session to lapse", func() bool { return s.sessionLeft(t) <= 0 })
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
				atOnce(4, func(turn int) {
					body := fmt.Appendf(nil, `{"text":"words of turn %d, which are new","sampling_params":{"max_new_tokens":4},"session_params":{"id":%q}}`, turn, id)
					if a := s.post(t.Context(), atGenerate, body); a.status != http.StatusOK || a.engine() != home {
						t.Errorf("%s: a turn got status %d by %s, opened by %s: %q", block, a.status, a.engine(), home, a.body)
					}
				})
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
			equal(t, s.pool(t).Sessions, 0, "%s: sessions left", block)
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
	equal(t, s.scrape(t).value(sessions), 8, "bound sessions")
}

// TestAnswersShowTheirSession follows the source and the state of a session through its life.
func TestAnswersShowTheirSession(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "response_headers X-KV-", numbered(engines), "trust pins", affinity("hard")))
	want := func(what string, a answer, source, state string) {
		t.Helper()
		if got := a.header.Get("X-KV-Session-Source"); got != source || a.header.Get("X-KV-Session-State") != state {
			t.Errorf("%s: source %q, state %q, want %q, %q", what, got, a.header.Get("X-KV-Session-State"), source, state)
		}
	}
	id := []string{"X-Session-Id", "s"}
	const source = "header:X-Session-Id"
	want("no session", s.mustChat(t, ask("a")), "", "")
	first := s.mustChat(t, ask("b"), id...)
	want("first turn", first, source, "new")
	want("second turn", s.mustChat(t, ask("c"), id...), source, "bound")
	want("the same key in nvext", s.mustChat(t, controlled("d", ""), "X-Session-Id", "other"), "nvext", "bound")
	other := 3 - int(first.engine()[1]-'0')
	want("a pin elsewhere", s.mustChat(t, withHints("e", fmt.Sprintf(`{"backend_instance_id":%d}`, other)), id...), source, "away")
	pinned := controlled("a pinned first turn", "")
	pinned.Nvext = fmt.Appendf(nil, `{"session_control":{"session_id":"p"},"backend_instance_id":%d}`, other)
	want("a pinned first turn", s.mustChat(t, pinned), "nvext", "new")
	if a := s.mustChat(t, ask("e"), "X-Session-Id", "p", "X-Dynamo-Session-Final", "true"); a.engine() != fmt.Sprint("e", other) {
		t.Errorf("the turn after a pinned one is at %s", a.engine())
	}
	engines[first.engine()[1]-'1'].Kill()
	want("home is gone", s.mustChat(t, ask("f"), id...), source, "moved")
	want("last turn", s.mustChat(t, ask("g"), append(id, "X-Dynamo-Session-Final", "true")...), source, "final")
	eventually(t, "the session to be forgotten", func() bool { return s.scrape(t).value(sessions) == 0 })
	want("a last turn without a binding", s.mustChat(t, ask("h"), append(id, "X-Dynamo-Session-Final", "true")...), source, "final")
	equal(t, s.scrape(t).value(sessions), 0, "sessions after the last turn of an unknown one")
	s.booksAtZero(t)
}

// TestPreferencesSteer has preferred taints, which attract and repel, and
// overrides of the policy's options.
func TestPreferencesSteer(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	s := startCaddy(t, route(engines, "pool steers", numbered(engines, "taints a", "taints b", "taints c"), "response_headers X-KV-", "trust overrides explain"))
	explain := func(body []byte) (x adminExplained) {
		s.api(t, http.MethodPost, "/pools/steers/explain?path=/v1/chat/completions", body, &x)
		return x
	}
	for _, v := range []struct {
		weights, want string
	}{
		{`{"b":1}`, "e2"},
		{`{"a":-1,"b":-1}`, "e3"},
		{`{"a":0.1,"c":0.5}`, "e3"},
	} {
		for i := range 6 {
			c := withHints(fmt.Sprintf("%d of %s: %s", i, v.weights, strings.Repeat("many words ", 40)), `{"routing_constraints":{"preferred_taints":`+v.weights+`}}`)
			if a := s.mustChat(t, c); a.engine() != v.want {
				t.Errorf("preferring %s: answered by %s, want %s", v.weights, a.engine(), v.want)
			}
		}
	}
	// With the overlap worth nothing, the worker that holds the prompt has no
	// advantage.
	prompt := strings.Repeat("a prompt that one of them holds ", 100)
	warm := s.mustChat(t, ask(prompt)).engine()
	x := explain(withHints(prompt, `{}`).body())
	y := explain(withHints(prompt, `{"router_config_override":{"overlap_score_credit":0}}`).body())
	alike := func(x adminExplained) bool { // attention makes a difference
		a, b, c := x.Candidates[0].Cost, x.Candidates[1].Cost, x.Candidates[2].Cost
		return min(a, b, c) > 0.9*max(a, b, c)
	}
	if fmt.Sprint("e", x.Chosen.Worker) != warm || alike(x) || !alike(y) {
		t.Errorf("candidates %+v, with the override %+v", x.Candidates, y.Candidates)
	}
	z := explain(withHints(prompt, `{"router_config_override":{"router_temperature":5}}`).body())
	if len(z.Chosen.Drawn) != 3 {
		t.Errorf("with a temperature: %+v", z.Chosen)
	}
}
