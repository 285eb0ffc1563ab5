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
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestRoutingIsLogged checks the debug line of a choice.
func TestRoutingIsLogged(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines), "debug")
	s.mustChat(t, ask("anybody?"))
	line := regexp.MustCompile(`"msg":"worker chosen",.*"worker":\d+,.*"dp_rank":0,.*"overlap_blocks":\d+,.*"request_blocks":\d+`)
	eventually(t, 2*time.Second, "the debug line", func() bool {
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
	eventually(t, 2*time.Second, "the access log", func() bool {
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
