package tests

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestConstraintsLimitTheWorkers has allowed workers and required taints.
func TestConstraintsLimitTheWorkers(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines, "taints gold zone-a", "taints gold zone-b", "taints spot"), "policy round_robin", "trust overrides"))
	for _, v := range []struct{ nvext, want string }{
		{`{"allowed_worker_ids":[2,3,99]}`, "e2 e3"},
		{`{"router_config_override":{"allowed_worker_ids":[4]}}`, "e4"},
		{`{"routing_constraints":{"required_taints":["gold"]}}`, "e1 e2"},
		{`{"routing_constraints":{"required_taints":["gold","zone-b"]}}`, "e2"},
		{`{"routing_constraints":{"required_taints":["gold"]},"allowed_worker_ids":[1,3]}`, "e1"},
		{`{"routing_constraints":{"required_taints":[]}}`, "e1 e2 e3 e4"},
	} {
		used := map[string]bool{}
		for range 8 {
			used[s.mustChat(t, wishing("hello", v.nvext)).engine()] = true
		}
		var got []string
		for _, e := range engines {
			if used[e.Name()] {
				got = append(got, e.Name())
			}
		}
		if strings.Join(got, " ") != v.want {
			t.Errorf("%s: answered by %v, want %s", v.nvext, got, v.want)
		}
	}
	for _, v := range []struct{ nvext, in string }{
		{`{"allowed_worker_ids":[7,8]}`, "nvext.allowed_worker_ids [7 8]"},
		{`{"routing_constraints":{"required_taints":["gold","spot"]}}`, `nvext.routing_constraints.required_taints ["gold" "spot"]`},
	} {
		a := s.chat(t.Context(), wishing("hello", v.nvext))
		wantError(t, v.nvext, a, 503, "no_worker", v.in)
	}
	// A retry stays among those that are allowed.
	for _, e := range engines[:2] {
		e.SetFault(canned.Fault{Kind: canned.Status, Status: http.StatusServiceUnavailable})
	}
	if a := s.chat(t.Context(), wishing("hello", `{"routing_constraints":{"required_taints":["gold"]}}`)); a.status != 503 || a.engine() == "" {
		t.Errorf("status %d by %q, want the engine's own", a.status, a.engine())
	}
	if n := engines[0].Requests() + engines[1].Requests(); n == 0 {
		t.Error("nobody was asked")
	}
	s.booksAtZero(t)
}

// TestPreferencesSteer has preferred taints, which attract and repel, and
// overrides of the policy's options.
func TestPreferencesSteer(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines, "taints a", "taints b", "taints c"), "response_headers X-KV-", "trust overrides explain"))
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
	x := s.explain(t, wishing(prompt, `{}`).body())
	y := s.explain(t, wishing(prompt, `{"router_config_override":{"overlap_score_credit":0}}`).body())
	alike := func(x adminExplained) bool { // attention makes a difference
		a, b, c := x.Candidates[0].Cost, x.Candidates[1].Cost, x.Candidates[2].Cost
		return min(a, b, c) > 0.9*max(a, b, c)
	}
	if fmt.Sprint("e", x.Chosen.Worker) != warm || alike(x) || !alike(y) {
		t.Errorf("candidates %+v, with the override %+v", x.Candidates, y.Candidates)
	}
	z := s.explain(t, wishing(prompt, `{"router_config_override":{"router_temperature":5}}`).body())
	if len(z.Chosen.Drawn) != 3 {
		t.Errorf("with a temperature: %+v", z.Chosen)
	}
	s = startCaddy(t, route(engines, "policy least_load", "trust overrides"))
	s.mustChat(t, wishing("hello", `{"router_config_override":{"router_temperature":5}}`))
	if n := s.logged(t, "no effect under this policy"); n != 1 {
		t.Errorf("%d log lines say that it is without effect", n)
	}
}
