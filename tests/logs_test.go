package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// TestChoiceIsInPlaceholdersAndAccessLog reads the choice where an operator would: in a
// header of the operator's, in the access log, and in the debug line.
func TestChoiceIsInPlaceholdersAndAccessLog(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	file := filepath.Join(t.TempDir(), "access.log")
	s := startCaddy(t, fmt.Sprintf("log {\noutput file %s\nformat json\n}\n", file)+
		`header >X-Choice "{http.kv_router.worker} {http.kv_router.dp_rank} {http.kv_router.reason} {http.kv_router.overlap_blocks} {http.kv_router.predicted_cached_tokens} {http.kv_router.session}"
		`+route(engines, fmt.Sprintf("worker %s {\nid 11\n}\nworker %s {\nid 12\n}", engines[0].Addr(), engines[1].Addr())), "debug")
	a := s.mustChat(t, ask("anybody?"), "X-Session-Id", "secret")
	line := regexp.MustCompile(`"msg":"worker chosen",.*"worker":\d+,.*"dp_rank":0,.*"overlap_blocks":\d+,.*"request_blocks":\d+`)
	eventually(t, "the debug line", func() bool {
		data, err := os.ReadFile(s.log)
		return err == nil && line.Match(data)
	})
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

func init() { caddy.RegisterModule(new(heard)) }

// heard is a handler of events that remembers them.
type heard struct{}

var hears struct {
	sync.Mutex
	events map[string]bool
}

// CaddyModule implements caddy.Module.
func (heard) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.heard", New: func() caddy.Module { return new(heard) }}
}

// UnmarshalCaddyfile implements caddyfile.Unmarshaler.
func (heard) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	for d.Next() { //nolint:revive // it has no arguments
	}
	return nil
}

// Handle implements caddyevents.Handler.
func (heard) Handle(ctx context.Context, e caddy.Event) error {
	repl, _ := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	hears.Lock()
	defer hears.Unlock()
	if hears.events == nil {
		hears.events = make(map[string]bool)
	}
	hears.events[fmt.Sprint(e.Name(), " ", repl.ReplaceAll("{event.data.upstream}{event.data.condition}", ""))] = true
	return nil
}

// TestEvents has workers fail, come back and be drained, also after a reload, and a condition begin.
func TestEvents(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	of := engines[0].Addr()
	s := startCaddy(t, route(engines), "events {\non * heard\n}")
	told := func(what string) {
		t.Helper()
		eventually(t, what, func() bool {
			hears.Lock()
			defer hears.Unlock()
			return hears.events[what]
		})
	}
	s.mustChat(t, ask("hello"))
	engines[0].Kill()
	for range 2 { // the first one finds it dead
		if a := s.chat(t.Context(), ask("hello")); a.ok() {
			t.Error("a dead engine has answered")
		}
	}
	told("kv_router_worker_marked_down " + of)
	told("kv_router_condition_begins all workers are marked down, and the router uses them anyway")
	revive(t, engines[0])
	told("kv_router_worker_healthy " + of)
	s.mustReload(t, route(engines)) // the pool goes on, with another events app
	kvRouter(t, "drain", of, "--address", s.admin)
	told("kv_router_worker_drained " + of)
}

// TestRecordedTrace holds conversations with one system prompt, and makes a trace of the journal of
// the router that runs.
func TestRecordedTrace(t *testing.T) {
	const conversations, turns = 4, 3
	engines := []*engine.Engine{startSimulated(t, engine.Config{}), startSimulated(t, engine.Config{})}
	s := startCaddy(t, route(engines))
	rng := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // a test
	system := message{"system", prose(rng, 4000, 4000)}
	var talks [conversations]chat
	for turn := range turns {
		for i := range talks {
			k := &talks[i]
			if turn == 0 {
				*k = chat{Model: "sim-8b", Messages: []message{system}}
			}
			k.Messages = append(k.Messages, message{"user", prose(rng, 700, 900)})
			a := s.mustChat(t, *k)
			k.Messages = append(k.Messages, message{"assistant", a.text})
		}
	}
	var b bytes.Buffer
	var n int
	eventually(t, "all to be written", func() bool {
		b.Reset()
		var others int
		var err error
		n, others, err = journal.Trace(filepath.Join(filepath.Dir(s.log), "caddy", "kv_router", "default.journal"), &b)
		return err == nil && n == conversations*turns && others == 0
	})
	got, err := trace.Read(&b)
	if err != nil || len(got.Requests) != n || !got.Sessions || got.Closed {
		t.Fatalf("%+v, %v", got, err)
	}
	tokens, sessions := 0, make(map[int][]trace.Request)
	for _, r := range got.Requests {
		tokens += r.In
		if last := sessions[r.Session]; r.Turn != len(last) {
			t.Errorf("session %d has turn %d after %d", r.Session, r.Turn, len(last))
		} else if len(last) > 0 {
			before := last[len(last)-1].Blocks
			if len(before) >= len(r.Blocks) || !slices.Equal(before, r.Blocks[:len(before)]) {
				t.Errorf("session %d: a prompt does not go on from the one before", r.Session)
			}
		}
		sessions[r.Session] = append(sessions[r.Session], r)
	}
	first := got.Requests[0].Blocks
	if other := got.Requests[1].Blocks; len(sessions) != conversations || first[0] != other[0] || first[len(first)-1] == other[len(other)-1] {
		t.Errorf("%d sessions, which begin with %v and %v", len(sessions), first, other)
	}
	want := 0
	for _, e := range engines {
		for _, r := range e.Journal() {
			want += r.PromptTokens
		}
	}
	if tokens < want*8/10 || tokens > want*12/10 {
		t.Errorf("%d tokens of prompts, the engines had %d", tokens, want)
	}
}

// entry is a line of Caddy's log.
type entry struct {
	TS float64 // Unix time in seconds

	Level, Msg, Pool, Upstream, Condition, Setting, Value, Effect, Advice string
}

// entries returns the lines of Caddy's log with a message that begins so.
func (s *server) entries(t *testing.T, message string) []entry {
	t.Helper()
	data, err := os.ReadFile(s.log)
	noError(t, err)
	var found []entry
	for line := range strings.Lines(string(data)) {
		var e entry
		if json.Unmarshal([]byte(line), &e) == nil && strings.HasPrefix(e.Msg, message) {
			found = append(found, e)
		}
	}
	return found
}

// conditions returns the lines of Caddy's log in which a condition begins whose name begins so.
func (s *server) conditions(t *testing.T, name string) []entry {
	t.Helper()
	return slices.DeleteFunc(s.entries(t, "condition begins"), func(e entry) bool { return !strings.HasPrefix(e.Condition, name) })
}

const hurts = "setting hurts"

// TestSettingsThatHurtAreNamed has a configuration with each harmful setting once, and then one with recommended settings
// and harmless ones that resemble them.
func TestSettingsThatHurtAreNamed(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, `kv_router {
		pool hurt
		reverse_proxy `+e.Addr()+` {
			response_buffers 4KiB
			transport http {
				response_header_timeout 30s
				read_timeout 2m
			}
		}
	}`, "servers {\ntimeouts {\nwrite 1m\n}\n}")
	want := map[string]string{
		"response_buffers": "4096", "response_header_timeout": "30s", "read_timeout": "2m0s",
	}
	got := s.entries(t, hurts)
	for _, l := range got {
		name := l.Setting
		if l.Level != "warn" || l.Value != want[name] || l.Value == "" || l.Effect == "" || l.Advice == "" || l.Pool != "hurt" {
			t.Errorf("the log says %+v, want the value %q, an effect and an advice", l, want[name])
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d warnings at start, want %d: %+v", len(got), len(want), got)
	}
	s.mustChat(t, ask("first"))
	s.mustChat(t, ask("second"))
	got = s.entries(t, hurts)
	n := len(got) - len(want)
	if n != 1 || got[len(want)].Setting != "servers timeouts write" || got[len(want)].Value != "1m0s" {
		t.Errorf("%d warnings of the server's timeout after two requests, want 1: %+v", n, got[len(want):])
	}
	s.globals = strings.Replace(s.globals, "write 1m", "write 1h\nread_body 10s", 1)
	s.mustReload(t, `kv_router {
		pool well
		reverse_proxy `+e.Addr()+` {
			flush_interval 1s
			stream_timeout 1m
			lb_try_duration 1s
			transport http {
				response_header_timeout 10m
				read_timeout 1h
				keepalive_idle_conns_per_host 8
			}
		}
	}`)
	s.mustChat(t, ask("third").streamed())
	if after := s.entries(t, hurts); len(after) != len(got) {
		t.Errorf("warnings of what does not hurt: %+v", after[len(got):])
	}
}

// TestCompressedStreamsAreNoticed has an encode before kv_router that
// compresses event streams, and then one that does not.
func TestCompressedStreamsAreNoticed(t *testing.T) {
	const condition = "event streams are compressed"
	engines := startEngines(t, 1, canned.Pace{Words: 200})
	plain := "@site not path /v1/*\nencode @site gzip\n" + route(engines, "pool plain")
	s := startCaddy(t, plain)
	ask := func() answer { return s.chat(t.Context(), ask("tell me").streamed(), "Accept-Encoding", "gzip") }
	if a := ask(); a.header.Get("Content-Encoding") != "" {
		t.Fatalf("encode was kept away, and the stream is %q", a.header.Get("Content-Encoding"))
	}
	if got := s.conditions(t, condition); len(got) > 0 {
		t.Errorf("nothing is compressed, and the log says %+v", got)
	}
	s.mustReload(t, "encode gzip\n"+route(engines, "pool squeezed"))
	for range 3 {
		if a := ask(); a.header.Get("Content-Encoding") != "gzip" {
			t.Fatalf("the stream is %q: encode was to compress it", a.header.Get("Content-Encoding"))
		}
	}
	eventually(t, "the log says so", func() bool { return len(s.conditions(t, condition)) > 0 })
	if got := s.conditions(t, condition); len(got) != 1 || got[0].Pool != "squeezed" {
		t.Errorf("the log says %+v, want one line", got)
	}
	for pool, want := range map[string]float64{"plain": 0, "squeezed": 1} {
		equal(t, s.scrape(t).value("caddy_kv_router_incidents", `pool="`+pool+`"`), want, "incidents of pool %s", pool)
	}
}

const engineWarnings = "caddy_kv_router_worker_engine_warnings"
