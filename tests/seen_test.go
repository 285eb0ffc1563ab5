package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestResponseHeadersSayTheChoice makes two turns of a conversation. The second returns to
// the worker of the first, and its header has the overlap there.
func TestResponseHeadersSayTheChoice(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	var workers []string
	for i, e := range engines {
		workers = append(workers, fmt.Sprintf("worker %s {\n\tid %d\n}", e.Addr(), 100+i))
	}
	s := startCaddy(t, route(engines, append(workers, "response_headers X-KV-")...))
	ids := map[string]string{"e1": "100", "e2": "101", "e3": "102"}

	c := ask(prose(rand.New(rand.NewPCG(1, 1)), 2000, 2000))
	first := s.mustChat(t, c)
	c.Messages = append(c.Messages, message{"assistant", first.text}, message{"user", "and then?"})
	second := s.mustChat(t, c)
	for i, a := range []answer{first, second} {
		if got, want := a.header.Get("X-KV-Worker"), ids[a.engine()]; got != want {
			t.Errorf("turn %d: worker %q, want %q", i+1, got, want)
		}
		if rank := a.header.Get("X-KV-Dp-Rank"); rank != "0" {
			t.Errorf("turn %d: rank %q, want 0", i+1, rank)
		}
	}
	number := func(a answer, name string) int {
		n, err := strconv.Atoi(a.header.Get(name))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		return n
	}
	if n := number(first, "X-KV-Overlap-Blocks"); n != 0 || first.header.Get("X-KV-Reason") != "load" {
		t.Errorf("first turn: overlap %d, reason %q", n, first.header.Get("X-KV-Reason"))
	}
	// More than the question: its answer is held, too. 2000 bytes are 31 blocks
	// of 64, 500 tokens are 31 of 16.
	if n := number(second, "X-KV-Overlap-Blocks"); n <= 31 || second.header.Get("X-KV-Reason") != "overlap" {
		t.Errorf("second turn: overlap %d, reason %q", n, second.header.Get("X-KV-Reason"))
	}
	if n := number(second, "X-KV-Predicted-Cached-Tokens"); n < 450 || n > 800 {
		t.Errorf("second turn: %d predicted cached tokens of about 560", n)
	}
	t.Logf("second turn: %s blocks, %s tokens", second.header.Get("X-KV-Overlap-Blocks"), second.header.Get("X-KV-Predicted-Cached-Tokens"))

	if err := s.reload(route(engines)); err != nil {
		t.Fatal(err)
	}
	for name := range s.mustChat(t, c).header {
		if strings.HasPrefix(strings.ToUpper(name), "X-KV-") {
			t.Errorf("the header %s was not asked for", name)
		}
	}
}

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

// TestMetricsAreThereBeforeTheFirstRequest checks that dashboards work on a fresh start,
// and that all labels are bounded.
func TestMetricsAreThereBeforeTheFirstRequest(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "pool fresh"))
	m := s.scrape(t)
	for _, name := range []string{leases, leasesExpired, sessions} {
		if v, there := m.sum(name, `pool="fresh"`); !there || v != 0 {
			t.Errorf("%s = %v (there: %v), want 0", name, v, there)
		}
	}
	before := m.value(requestsTotal, `pool="fresh"`)
	for i := range 10 {
		c := ask(fmt.Sprintf("question %d", i))
		c.Model = fmt.Sprintf("model-%d", i)
		c.Stream = i%2 == 0
		s.mustChat(t, c, "X-Session-Id", fmt.Sprintf("secret-%d", i))
	}
	m = s.scrape(t)
	if v := m.value(requestsTotal, `pool="fresh"`) - before; v != 10 {
		t.Errorf("%v requests counted, want 10", v)
	}
	for series := range m {
		if strings.HasPrefix(series, "caddy_kv_router_") && (strings.Contains(series, "secret-") || strings.Contains(series, "model-")) {
			t.Errorf("what clients choose is a label: %s", series)
		}
	}
	s.booksAtZero(t)
}
