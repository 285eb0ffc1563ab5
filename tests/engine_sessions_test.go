package tests

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const (
	engineSessions = "caddy_kv_router_engine_sessions_total"

	atGenerate, atChat, atCompletions = "/generate", "/v1/chat/completions", "/v1/completions"
)

// turn is a turn of a session whose client controls the session.
type turn struct {
	path   string // empty: /generate
	id     string // of the session; empty: s
	action string
	nvext  string // further members of nvext
	ttl    int    // seconds; 0: none
	tokens int    // of the answer, at most; 0: 8
	stream bool
}

// text is what each turn adds to its session.
const text = "some words that are new in this turn"

func (u turn) body() string {
	control := map[string]any{"session_id": cmp.Or(u.id, "s")}
	if u.action != "" {
		control["action"] = u.action
	}
	if u.ttl > 0 {
		control["timeout"] = u.ttl
	}
	said, _ := json.Marshal(control)
	u.tokens = cmp.Or(u.tokens, 8)
	prompt := map[string]string{
		atGenerate:    fmt.Sprintf(`"text":%q,"sampling_params":{"max_new_tokens":%d}`, text, u.tokens),
		atChat:        fmt.Sprintf(`"model":"sim-8b","messages":[{"role":"user","content":%q}],"max_tokens":%d`, text, u.tokens),
		atCompletions: fmt.Sprintf(`"model":"sim-8b","prompt":%q,"max_tokens":%d`, text, u.tokens),
	}[u.where()]
	return fmt.Sprintf(`{%s,"stream":%v,"nvext":{%s"session_control":%s}}`, prompt, u.stream, u.nvext, said)
}

func (u turn) where() string { return cmp.Or(u.path, atGenerate) }

// turn sends a turn and reads its whole answer.
func (s *server) turn(t testing.TB, u turn, header ...string) answer {
	t.Helper()
	return s.post(t.Context(), u.where(), []byte(u.body()), header...)
}

func (s *server) mustTurn(t testing.TB, u turn, header ...string) answer {
	t.Helper()
	a := s.turn(t, u, header...)
	if !a.ok() {
		t.Fatalf("%+v: status %d, error %v, body %.300q", u, a.status, a.err, a.body)
	}
	return a
}

// refusedTurn sends a turn that the router must refuse.
func (s *server) refusedTurn(t testing.TB, u turn, status int, code string, header ...string) {
	t.Helper()
	s.turn(t, u, header...).wantRefusal(t, status, code)
}

func (a answer) wantRefusal(t testing.TB, status int, code string) {
	t.Helper()
	if got, _ := errorOf(a); a.status != status || got != code {
		t.Errorf("status %d, error %v, body %.300q, want %d %s", a.status, a.err, a.body, status, code)
	}
}

// startTurn sends a turn and does not wait for its answer.
func (s *server) startTurn(t testing.TB, u turn) asked { return s.start(t, u.where(), u.body()) }

// holders starts SGLangs with sessions.
func holders(t testing.TB, n int, cfg engine.Config) []*engine.Engine {
	t.Helper()
	cfg.Flavour, cfg.StreamingSessions, cfg.KeepBodies = engine.SGLang, true, true
	return startFleet(t, n, cfg)
}

// startHolding runs a Caddy before SGLangs, and waits until it knows them.
func startHolding(t testing.TB, engines []*engine.Engine, block ...string) *server {
	t.Helper()
	s := startCaddy(t, route(engines, block...))
	s.knows(t, engines)
	return s
}

func (s *server) knows(t testing.TB, engines []*engine.Engine) {
	t.Helper()
	for _, e := range engines {
		s.awaitType(t, e.Addr(), "sglang")
	}
}

// did counts what engines did with a session.
func did(engines []*engine.Engine, id string) map[engine.SessionResult]int {
	n := make(map[engine.SessionResult]int)
	for _, e := range engines {
		for _, r := range e.Journal() {
			if r.Session == id {
				n[r.SessionResult]++
			}
		}
	}
	return n
}

// didAll counts what engines did with each session.
func didAll(engines []*engine.Engine) map[string]map[engine.SessionResult]int {
	all := make(map[string]map[engine.SessionResult]int)
	for _, e := range engines {
		for _, r := range e.Journal() {
			if r.Session == "" {
				continue
			}
			if all[r.Session] == nil {
				all[r.Session] = make(map[engine.SessionResult]int)
			}
			all[r.Session][r.SessionResult]++
		}
	}
	return all
}

// open returns how many sessions of an id are open on an engine, as its journal says.
func open(e *engine.Engine, id string) int {
	n := did([]*engine.Engine{e}, id)
	return n[engine.Opened] - n[engine.Closed] - n[engine.Deferred]
}

// closedOnce waits until each session of an id, of which there must be opened ones, is
// closed on its engine. No engine may have got another close, or a turn that it refused.
func closedOnce(t testing.TB, engines []*engine.Engine, id string, opened int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d sessions %s to be closed: %v", opened, id, did(engines, id)), func() bool {
		n := did(engines, id)
		for _, e := range engines {
			if open(e, id) != 0 {
				return false
			}
		}
		return n[engine.Opened] == opened
	})
	settled(t, engines, id)
}

// settled fails the test if an engine closed a session that it did not hold, or refused a
// turn.
func settled(t testing.TB, engines []*engine.Engine, id string) {
	t.Helper()
	n := did(engines, id)
	if n[engine.Unknown]+n[engine.Busy]+n[engine.Closing]+n[engine.Unsupported] > 0 {
		t.Errorf("session %s: the engines did %v", id, n)
	}
}

// TestConversationsThatEnginesHold has whole conversations, of which each turn has only
// the new tokens. Each engine that serves one has its own: no turn may be elsewhere.
func TestConversationsThatEnginesHold(t *testing.T) {
	for _, v := range []struct {
		name   string
		paths  []string
		ranks  int
		option string
	}{
		{"Generate", []string{atGenerate}, 2, "sessions auto"},
		{"ChatAndCompletions", []string{atChat, atCompletions}, 2, "sessions on"},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := holders(t, 3, engine.Config{Ranks: v.ranks, SessionsInChat: true})
			s := startHolding(t, engines, "worker * {\n"+v.option+"\n}", "response_headers X-KV-")
			before := s.scrape(t)
			const conversations = 8
			homes := make(map[string]string)
			for n := range 5 {
				for c := range conversations {
					u := turn{id: fmt.Sprintf("c%d", c), path: v.paths[n%len(v.paths)], stream: (n+c)%2 == 0}
					u.action = map[int]string{0: "open", 4: "close"}[n]
					a := s.mustTurn(t, u)
					home := a.header.Get("X-KV-Worker") + "/" + a.header.Get("X-KV-Dp-Rank")
					if n == 0 {
						homes[u.id] = home
					} else if homes[u.id] != home || a.header.Get("X-KV-Reason") != "session" {
						t.Errorf("%s: turn %d at %s because of %q, its home is %s", u.id, n, home, a.header.Get("X-KV-Reason"), homes[u.id])
					}
				}
			}
			for c := range conversations {
				id := fmt.Sprintf("c%d", c)
				closedOnce(t, engines, id, 1)
				checkContext(t, engines, id, 5)
			}
			for _, outcome := range [][]string{{`action="open"`, `outcome="opened"`}, {`action="close"`, `outcome="closed"`}} {
				eventually(t, fmt.Sprint("all to be counted as ", outcome), func() bool {
					return s.scrape(t).value(engineSessions, outcome...)-before.value(engineSessions, outcome...) == conversations
				})
			}
			m := s.scrape(t)
			s.booksAtZero(t)
			equal(t, m.value(sessions), 0, "sessions left")
		})
	}
}

// checkContext fails the test unless the engine that served a session has computed only what
// was new in each turn.
func checkContext(t *testing.T, engines []*engine.Engine, id string, turns int) {
	t.Helper()
	past, seen := 0, 0
	for _, e := range engines {
		for _, r := range e.Journal() {
			if r.Session != id || r.SessionResult != engine.Continued {
				continue
			}
			if seen > 0 && r.CachedTokens != past || r.PromptTokens <= past || r.PromptTokens > past+40 {
				t.Errorf("%s, turn %d on %s: %d of %d tokens were cached, the turns before had %d", id, seen+1, e.Name(), r.CachedTokens, r.PromptTokens, past)
			}
			past, seen = r.PromptTokens+r.AnswerTokens, seen+1
		}
	}
	equal(t, seen, turns, "%s: turns at the engines", id)
}

// TestSessionsAreOpenedTwice has a client that opens its session again, after turns and after
// it was closed.
func TestSessionsAreOpenedTwice(t *testing.T) {
	engines := holders(t, 3, engine.Config{})
	s := startHolding(t, engines)
	for range 3 {
		s.mustTurn(t, turn{action: "open"})
		s.mustTurn(t, turn{})
		s.mustTurn(t, turn{action: "open"})
		s.mustTurn(t, turn{action: "close"})
	}
	closedOnce(t, engines, "s", 3)
	if n := did(engines, "s"); n[engine.Exists] != 3 || n[engine.Continued] != 12 {
		t.Errorf("the engines did %v", n)
	}
	// one session for one request
	s.mustTurn(t, turn{id: "once", action: "open"}, "X-Dynamo-Session-Final", "true")
	closedOnce(t, engines, "once", 1)
}

// TestSessionIsOpenedAgainOnADrainingWorker has a turn leave its draining worker, which is the only
// one, and open the session there again. The end of that turn must not close it.
func TestSessionIsOpenedAgainOnADrainingWorker(t *testing.T) {
	engines := holders(t, 1, engine.Config{})
	s := startHolding(t, engines)
	s.mustTurn(t, turn{action: "open"})
	s.mustTurn(t, turn{})
	s.api(t, http.MethodPost, defaultPool+"/workers/"+engines[0].Addr()+"/drain", nil, new(adminWorker))
	s.mustTurn(t, turn{action: "open"})
	for range 3 {
		s.mustTurn(t, turn{})
	}
}

// TestSessionsThatCannotBeOpened has opens that fail. The client gets a clear error, and
// nothing is left open or bound.
func TestSessionsThatCannotBeOpened(t *testing.T) {
	const refused = "session_not_opened"
	engines := holders(t, 1, engine.Config{})
	for _, v := range []struct {
		name   string
		fault  engine.Fault
		u      turn
		status int
		opened int
	}{
		{"no sessions in chat", engine.Fault{}, turn{path: atChat}, http.StatusBadRequest, 0},
		{"refused", engine.Fault{Kind: engine.NoSessions}, turn{}, http.StatusBadGateway, 0},
		{"status", engine.Fault{Kind: engine.Status, Status: 500, Path: engine.OpenPath}, turn{}, http.StatusBadGateway, 0},
		{"status of an open one", engine.Fault{Kind: engine.Status, Status: 500, Path: engine.OpenPath, Late: true}, turn{}, http.StatusBadGateway, 1},
		{"reset", engine.Fault{Kind: engine.Reset, Path: engine.OpenPath}, turn{}, http.StatusBadGateway, 0},
		{"reset of an open one", engine.Fault{Kind: engine.Reset, Path: engine.OpenPath, Late: true}, turn{}, http.StatusBadGateway, 1},
	} {
		t.Run(v.name, func(t *testing.T) {
			s := startHolding(t, engines)
			if v.fault.Kind != engine.NoFault {
				noError(t, engines[0].SetFault(v.fault))
			}
			v.u.id, v.u.action = strings.ReplaceAll(v.name, " ", "-"), "open"
			s.refusedTurn(t, v.u, v.status, refused)
			eventually(t, "the session to be closed", func() bool { return open(engines[0], v.u.id) == 0 })
			if n := did(engines, v.u.id); n[engine.Opened] != v.opened || n[engine.Continued] != 0 {
				t.Errorf("the engine did %v", n)
			}
			setFault(t, engines[0], engine.Fault{Path: engine.OpenPath})
			equal(t, s.scrape(t).value(sessions), 0, "bound sessions")
			s.booksAtZero(t)
		})
	}
	t.Run("other engine", func(t *testing.T) {
		other := startSimulated(t, engine.Config{})
		s := startCaddy(t, route([]*engine.Engine{other}))
		s.refusedTurn(t, turn{path: atChat, action: "open"}, http.StatusBadRequest, refused)
		s.mustTurn(t, turn{path: atChat})
	})
}

// TestSessionsAreTheirTenants has two tenants, and two users of one, with sessions of one id.
func TestSessionsAreTheirTenants(t *testing.T) {
	for _, v := range []struct{ name, block, header string }{
		{"Tenants", "trust tenants", "X-Tenant-Id"}, {"Scope", "affinity {\nscope {http.request.header.X-User}\n}", "X-User"},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := holders(t, 1, engine.Config{})
			s := startHolding(t, engines, v.block, "worker * {\ncache_salt on\n}")
			for _, who := range []string{"a", "b"} {
				s.mustTurn(t, turn{action: "open"}, v.header, who)
			}
			s.mustTurn(t, turn{action: "close"}, v.header, "a")
			s.mustTurn(t, turn{}, v.header, "b")
			ids := make(map[string]bool)
			for _, r := range engines[0].Journal() {
				if r.SessionResult == engine.Opened {
					ids[r.Session] = true
				}
			}
			if len(ids) != 2 || ids["s"] {
				t.Errorf("the engine opened %v", ids)
			}
			eventually(t, "one of the sessions to be closed", func() bool {
				n := 0
				for id := range ids {
					n += open(engines[0], id)
				}
				return n == 1
			})
			s.mustTurn(t, turn{}, v.header, "b")
			s.mustTurn(t, turn{action: "close"}, v.header, "b")
			for id := range ids {
				closedOnce(t, engines, id, 1)
			}
		})
	}
}
