package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestRoutingIsLogged checks the debug line of a choice.
func TestRoutingIsLogged(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines), "debug")
	s.mustChat(t, ask("anybody?"))
	line := regexp.MustCompile(`"msg":"worker chosen",.*"worker":\d+,.*"dp_rank":0,.*"overlap_blocks":\d+,.*"request_blocks":\d+`)
	eventually(t, "the debug line", func() bool {
		data, err := os.ReadFile(s.log)
		return err == nil && line.Match(data)
	})
}

// TestChoiceIsInPlaceholdersAndAccessLog reads the choice where an operator would: in a
// header of the operator's, and in the access log.
func TestChoiceIsInPlaceholdersAndAccessLog(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	file := filepath.Join(t.TempDir(), "access.log")
	s := startCaddy(t, fmt.Sprintf("log {\noutput file %s\nformat json\n}\n", file)+
		`header >X-Choice "{http.kv_router.worker} {http.kv_router.dp_rank} {http.kv_router.reason} {http.kv_router.overlap_blocks} {http.kv_router.predicted_cached_tokens} {http.kv_router.session}"
		`+route(engines, fmt.Sprintf("worker %s {\nid 11\n}\nworker %s {\nid 12\n}", engines[0].Addr(), engines[1].Addr())))
	a := s.mustChat(t, ask("anybody?"), "X-Session-Id", "secret")
	for name := range a.header {
		if strings.HasPrefix(strings.ToUpper(name), "X-KV-") {
			t.Errorf("the header %s was not asked for", name)
		}
	}
	id := map[string]string{"e1": "11", "e2": "12"}[a.engine()]
	var session adminSession
	s.api(t, http.MethodGet, defaultPool+"/sessions/secret?model=canned", nil, &session)
	if got, want := a.header.Get("X-Choice"), id+" 0 load 0 0 "+session.Hash; got != want || len(session.Hash) != 32 {
		t.Errorf("placeholders %q, want %q", got, want)
	}
	var entry struct {
		Router map[string]any `json:"kv_router"`
	}
	eventually(t, "the access log", func() bool {
		data, err := os.ReadFile(file)
		if err != nil {
			return false
		}
		lines := bytes.Split(bytes.TrimSpace(data), []byte("\n"))
		return json.Unmarshal(lines[len(lines)-1], &entry) == nil && entry.Router != nil
	})
	if fmt.Sprint(entry.Router["worker"]) != id || entry.Router["reason"] != "load" || entry.Router["outcome"] != "ok" {
		t.Errorf("the access log says %v", entry.Router)
	}
	if strings.Contains(fmt.Sprint(entry.Router), "secret") {
		t.Errorf("the access log gives the session's key away: %v", entry.Router)
	}
}

// TestPoolLinesFollowTheLogs directs the router's lines to a log of their own, over a reload.
func TestPoolLinesFollowTheLogs(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	file := filepath.Join(t.TempDir(), "router.log")
	s := startCaddy(t, route(engines), fmt.Sprintf("log router {\noutput file %s\ninclude http.handlers.kv_router\n}", file))
	for i, e := range engines {
		if i > 0 {
			s.mustReload(t, route(engines, "policy round_robin"))
		}
		e.Kill()
		eventually(t, "the pool's line", func() bool {
			s.chat(t.Context(), ask("hello"))
			data, _ := os.ReadFile(file)
			return bytes.Contains(data, []byte(`"worker is marked down"`)) && bytes.Contains(data, []byte(e.Addr()))
		})
	}
}

// TestRefusedRequestsAreLogged looks for refusals in the access log, with their codes, classes and tenants.
func TestRefusedRequestsAreLogged(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	file := filepath.Join(t.TempDir(), "access.log")
	s := startCaddy(t, fmt.Sprintf("log {\noutput file %s\nformat json\n}\n", file)+
		route(engines, "trust pins", "tenant {header.X-Org}", "limit requests 1 per 1h", "class chat {\nmatch path *\n}"))
	c := ask("hello")
	s.mustChat(t, c, "X-Org", "acme")
	if a := s.chat(t.Context(), c, "X-Org", "acme"); a.status != http.StatusTooManyRequests {
		t.Fatalf("status %d, body %q", a.status, a.body)
	}
	for _, nvext := range []string{`{"backend_instance_id":77}`, `5`} {
		c.Nvext = []byte(nvext)
		if a := s.chat(t.Context(), c); a.status != http.StatusBadRequest {
			t.Fatalf("nvext %s: status %d, body %q", nvext, a.status, a.body)
		}
	}
	eventually(t, "the refusals in the access log", func() bool {
		data, _ := os.ReadFile(file)
		count := func(line string) int { return bytes.Count(data, []byte(line)) }
		return count(`"kv_router":{"outcome":"rejected","refused":`) == 3 && count(`"refused":"rate_limit_exceeded","class":"chat","tenant":"acme"`) == 1 &&
			count(`"outcome":"ok","class":"chat","tenant":"acme"`) == 1
	})
}
