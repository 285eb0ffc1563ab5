package tests

import (
	"fmt"
	"net/http"
	"testing"
)

// named starts an engine that serves one model under two names.
func named(t *testing.T, owner, first, second string) *fake {
	t.Helper()
	return startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		switch r.URL.Path {
		case "/v1/models":
			const entry = `{"id":%q,"object":"model","owned_by":%q,"root":"Qwen/Qwen3-8B","parent":null}`
			fmt.Fprintf(w, `{"object":"list","data":[`+entry+","+entry+`,{"id":"ad","root":"Qwen/Qwen3-8B","parent":%q}]}`, first, owner, second, owner, first)
		case "/version":
			fmt.Fprint(w, `{"version":"0.31.0"}`)
		case "/metrics":
			fmt.Fprint(w, "# HELP vllm:x y\n")
		default:
			return false
		}
		return true
	})
}

// TestNamesOfOneModel has two vLLMs serve one model under two names. Prompts and sessions of both names
// are one. The names of an adapter, or of an engine that loads models on demand, are not.
func TestNamesOfOneModel(t *testing.T) {
	// at returns which workers serve a prompt in turn under some names.
	at := func(t *testing.T, s *server, text string, header []string, names ...string) (workers, states []string) {
		for i := range 8 {
			c := simChat(text)
			c.Model = names[i%len(names)]
			a := s.mustChat(t, c, header...)
			workers = append(workers, a.header.Get("X-Kv-Worker"))
			states = append(states, a.header.Get("X-Kv-Session-State"))
		}
		return workers, states
	}
	different := func(list []string) (n int) {
		seen := make(map[string]bool)
		for _, one := range list {
			seen[one] = true
		}
		return len(seen)
	}
	site := func(engines ...*fake) string {
		return "kv_router " + engines[0].addr() + " " + engines[1].addr() + " {\nresponse_headers X-KV-\npolicy warmest\n" + affinity("hard") + "\n}"
	}
	s := startCaddy(t, site(named(t, "vllm", "qwen-a", "gpt-4o"), named(t, "vllm", "gpt-4o", "qwen-a")))
	for i := range 6 {
		if workers, _ := at(t, s, fmt.Sprint(i, someWords(2000)), nil, "qwen-a", "gpt-4o"); different(workers) != 1 {
			t.Errorf("prompt %d is at %v", i, workers)
		}
		workers, states := at(t, s, "hi", []string{"X-Session-Id", fmt.Sprint("s", i)}, "gpt-4o", "qwen-a")
		if different(workers) != 1 || states[0] != "new" || states[1] != "bound" {
			t.Errorf("session %d is at %v: %v", i, workers, states)
		}
		if _, states := at(t, s, "hi", []string{"X-Session-Id", fmt.Sprint("s", i)}, "ad"); states[0] != "new" {
			t.Errorf("the adapter's session is %s", states[0])
		}
		var found adminSession
		s.api(t, http.MethodGet, defaultPool+fmt.Sprintf("/sessions/s%d?model=qwen-a", i), nil, &found)
		if !found.Bound {
			t.Errorf("the admin API does not find session %d", i)
		}
	}
	other := startCaddy(t, site(named(t, "somebody", "qwen-a", "gpt-4o"), named(t, "somebody", "gpt-4o", "qwen-a")))
	if _, states := at(t, other, "hi", []string{"X-Session-Id", "s"}, "gpt-4o", "qwen-a"); states[1] != "new" {
		t.Errorf("names of an unknown engine have one session: %v", states)
	}
}
