package tests

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

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
	want("a pin elsewhere", s.mustChat(t, wishing("e", fmt.Sprintf(`{"backend_instance_id":%d}`, other)), id...), source, "away")
	engines[first.engine()[1]-'1'].Kill()
	want("home is gone", s.mustChat(t, ask("f"), id...), source, "moved")
	want("last turn", s.mustChat(t, ask("g"), append(id, "X-Dynamo-Session-Final", "true")...), source, "final")
	eventually(t, "the session to be forgotten", func() bool { return s.scrape(t).value(sessions) == 0 })
	want("a last turn without a binding", s.mustChat(t, ask("h"), append(id, "X-Dynamo-Session-Final", "true")...), source, "final")
	if n := s.scrape(t).value(sessions); n != 0 {
		t.Errorf("%v sessions after the last turn of an unknown one", n)
	}
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
			c := wishing(fmt.Sprintf("%d of %s: %s", i, v.weights, strings.Repeat("many words ", 40)), `{"routing_constraints":{"preferred_taints":`+v.weights+`}}`)
			if a := s.mustChat(t, c); a.engine() != v.want {
				t.Errorf("preferring %s: answered by %s, want %s", v.weights, a.engine(), v.want)
			}
		}
	}
	// With the overlap worth nothing, the worker that holds the prompt has no
	// advantage.
	prompt := strings.Repeat("a prompt that one of them holds ", 100)
	warm := s.mustChat(t, ask(prompt)).engine()
	x := explain(wishing(prompt, `{}`).body())
	y := explain(wishing(prompt, `{"router_config_override":{"overlap_score_credit":0}}`).body())
	alike := func(x adminExplained) bool { // attention makes a difference
		a, b, c := x.Candidates[0].Cost, x.Candidates[1].Cost, x.Candidates[2].Cost
		return min(a, b, c) > 0.9*max(a, b, c)
	}
	if fmt.Sprint("e", x.Chosen.Worker) != warm || alike(x) || !alike(y) {
		t.Errorf("candidates %+v, with the override %+v", x.Candidates, y.Candidates)
	}
	z := explain(wishing(prompt, `{"router_config_override":{"router_temperature":5}}`).body())
	if len(z.Chosen.Drawn) != 3 {
		t.Errorf("with a temperature: %+v", z.Chosen)
	}
}
