package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// logged returns how many lines of Caddy's log contain the text.
func (s *server) logged(t testing.TB, text string) int {
	t.Helper()
	data, err := os.ReadFile(s.log)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// markedDown is the log line of a worker that is marked down.
const markedDown = "worker is marked down"

// TestRefusalsAreNotPassiveFailures has Caddy's passive health checks. They see what became of a
// request: one that nobody answers is a failure, and one that a busy worker refuses is not.
func TestRefusalsAreNotPassiveFailures(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, site("kv_router", engines, "fail_duration 30s"))
	for _, status := range []int{429, 503} {
		for _, e := range engines {
			e.SetFault(canned.Fault{Kind: canned.Status, Status: status, Body: "{}"})
		}
		for range 4 {
			if a := s.chat(t.Context(), ask("hi")); a.status != status {
				t.Errorf("status %d, error %v; want %d", a.status, a.err, status)
			}
		}
	}
	for _, e := range engines {
		e.SetFault(canned.Fault{})
	}
	if fails := s.passiveFails(t); fails[engines[0].Addr()]+fails[engines[1].Addr()] != 0 {
		t.Errorf("Caddy counts failures %v, want none", fails)
	}
	was := []int{engines[0].Requests(), engines[1].Requests()}
	eventually(t, "both are used again", func() bool {
		s.chat(t.Context(), ask("later"))
		return engines[0].Requests() > was[0] && engines[1].Requests() > was[1]
	})
	engines[0].Kill()
	for range 4 {
		s.mustChat(t, ask("and now?")) // on the other one, as Caddy sees it
	}
	engines[1].Kill()
	eventually(t, "requests that nobody answers are failures", func() bool {
		s.chat(t.Context(), ask("anybody?"))
		fails := s.passiveFails(t)
		return fails[engines[0].Addr()]+fails[engines[1].Addr()] > 0
	})
}

// passiveFails returns the failures by address that Caddy's admin endpoint shows.
func (s *server) passiveFails(t *testing.T) map[string]int {
	t.Helper()
	status, page, err := s.get(t.Context(), "http://"+s.admin+"/reverse_proxy/upstreams")
	if err != nil || status != http.StatusOK {
		t.Fatalf("status %d, error %v", status, err)
	}
	var list []struct {
		Address string `json:"address"`
		Fails   int    `json:"fails"`
	}
	if err := json.Unmarshal([]byte(page), &list); err != nil {
		t.Fatal(err)
	}
	fails := make(map[string]int)
	for _, up := range list {
		fails[up.Address] += up.Fails
	}
	return fails
}

// TestOtherAnswersDoNotHideADeadEngine has an engine whose core is dead. It answers
// prompts with errors at once, and everything that needs no core well.
func TestOtherAnswersDoNotHideADeadEngine(t *testing.T) {
	engineThat := func(computes bool) *fake {
		return startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			body, _ := io.ReadAll(r.Body)
			switch {
			case r.Method == http.MethodGet:
				_, _ = io.WriteString(w, `{}`)
			case strings.HasSuffix(r.URL.Path, "/count_tokens"):
				_, _ = io.WriteString(w, `{"input_tokens":5}`)
			case bytes.Contains(body, []byte("invalid")):
				w.WriteHeader(http.StatusBadRequest)
			case !computes:
				w.WriteHeader(http.StatusInternalServerError)
			default:
				return false
			}
			return true
		})
	}
	prompt := func(text string) []byte {
		return fmt.Appendf(nil, `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":%q}]}`, text)
	}
	for name, other := range map[string]func(s *server){
		"count_tokens": func(s *server) { s.post(t.Context(), "/v1/messages/count_tokens", prompt("hi")) },
		"health":       func(s *server) { _, _, _ = s.get(t.Context(), s.url+"/health") },
		"bad request":  func(s *server) { s.post(t.Context(), "/v1/chat/completions", prompt("invalid")) },
	} {
		t.Run(name, func(t *testing.T) {
			dead, well := engineThat(false), engineThat(true)
			s := startCaddy(t, "kv_router "+dead.addr()+" "+well.addr()+" {\npolicy round_robin\n}")
			for i := range 60 {
				s.post(t.Context(), "/v1/chat/completions", prompt(fmt.Sprint("prompt ", i)))
				for range 2 { // one on each
					other(s)
				}
				if s.logged(t, markedDown) > 0 {
					return
				}
			}
			t.Error("the dead engine is not marked down")
		})
	}
}

// TestNobodyIsMarkedDown has requests that fail, or answers that are odd, through no fault
// of the workers.
func TestNobodyIsMarkedDown(t *testing.T) {
	answers := func(kind, body string) func(*testing.T, *server, []*canned.Engine) {
		return func(t *testing.T, s *server, engines []*canned.Engine) {
			setAll(engines, func(w http.ResponseWriter, _ *http.Request) {
				w.Header()["Content-Type"] = nil
				if kind != "" {
					w.Header().Set("Content-Type", kind)
				}
				io.WriteString(w, body)
			})
			for i := range 20 {
				s.chat(t.Context(), ask(fmt.Sprint("question ", i)).streamed())
			}
		}
	}
	for name, v := range map[string]struct {
		proxy string
		do    func(t *testing.T, s *server, engines []*canned.Engine)
	}{
		"UnknownModel": {"", func(t *testing.T, s *server, engines []*canned.Engine) {
			f := canned.Fault{Kind: canned.Status, Status: 404, Body: `{"error":{"message":"no such model"}}`}
			for _, e := range engines {
				e.SetFault(f)
			}
			for i := range 80 {
				wantAnswer(t, s.chat(t.Context(), ask(fmt.Sprintf("mistake %d", i))), f)
			}
			if counts, top := spread(engines); top > 1.1 {
				t.Errorf("requests at the engines %v, want them even", counts)
			}
		}},
		// a newline in a header for the workers, which net/http refuses to send
		"InvalidHeader": {"header_up X-Query {query.q}", func(t *testing.T, s *server, _ []*canned.Engine) {
			for range 3 {
				if a := s.post(t.Context(), "/v1/chat/completions?q=%0Ax", ask("hi").body()); a.status != http.StatusBadGateway {
					t.Errorf("status %d, want 502", a.status)
				}
			}
			s.mustChat(t, ask("hi"))
		}},
		// llama.cpp answers 503 if all slots are busy, although it queues requests
		"BusyGet": {"", func(t *testing.T, s *server, engines []*canned.Engine) {
			setAll(engines, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
			if status, _, err := s.get(t.Context(), s.url+"/slots?fail_on_no_slot=1"); err != nil || status != http.StatusServiceUnavailable {
				t.Errorf("status %d, error %v, want 503", status, err)
			}
		}},
		// a client with a wrong key that names another client's session
		"OneSessionsErrors": {"", func(t *testing.T, s *server, engines []*canned.Engine) {
			for _, e := range engines {
				e.SetHandler(func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set("Content-Type", "application/json")
					w.Header().Set(canned.EngineHeader, e.Name())
					if r.Header.Get("Authorization") != "Bearer good" {
						w.WriteHeader(http.StatusUnauthorized)
					}
					io.WriteString(w, wholeJSON)
				})
			}
			prompt := strings.Repeat("You are the well known assistant of product X. ", 100)
			turn := func(key, more string) answer {
				return s.chat(t.Context(), ask(prompt+more), "Authorization", "Bearer "+key, "X-Session-Id", "theirs")
			}
			home := turn("good", "").engine()
			for i := range 20 {
				if a := turn("bad", fmt.Sprint(i)); a.status != http.StatusUnauthorized {
					t.Fatalf("status %d", a.status)
				}
			}
			if e := turn("good", "next").engine(); e != home {
				t.Errorf("the session moved from %q to %q", home, e)
			}
		}},
		"OneClientsErrorEvents": {"", answers("text/event-stream", "data: {\"error\":{\"message\":\"The input is too long\",\"code\":400}}\n\ndata: [DONE]\n\n")},
		"TypeInCapitals":        {"", answers("Text/Event-Stream; charset=utf-8", oneChunk+"data: [DONE]\n\n")},
		"ByteOrderMark":         {"", answers("application/json", "\xef\xbb\xbf"+wholeJSON)},
		"NoType":                {"", answers("", "plain words")},
	} {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, 3, canned.Pace{})
			up := strings.TrimPrefix(route(engines), "kv_router ")
			s := startCaddy(t, "kv_router {\npolicy round_robin\n"+affinity("hard")+"\nreverse_proxy "+up+" {\n"+v.proxy+"\n}\n}")
			v.do(t, s, engines)
			if n := s.logged(t, markedDown); n != 0 {
				t.Errorf("%d workers are marked down", n)
			}
			s.booksAtZero(t)
		})
	}
}

// TestLongRequestKeepsNobodyAway has a worker come back after a mark, and a request that lasts as the first
// one there. The worker gets others soon.
func TestLongRequestKeepsNobodyAway(t *testing.T) {
	held := func(method, path, body string, header ...string) func(ctx context.Context, s *server) {
		return func(ctx context.Context, s *server) { s.request(ctx, method, path, strings.NewReader(body), header...) }
	}
	for name, hold := range map[string]func(ctx context.Context, s *server){
		"WebSocket": held("GET", "/v1/realtime?model=m", "", "Connection", "Upgrade", "Upgrade", "websocket"),
		"GET":       held("GET", "/v1/responses/resp_1?stream=true", ""),
		"JSON":      held("POST", "/v1/chat/completions", string(ask("hold").body())),
	} {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, "pool "+name, "policy round_robin"))
			bad := engines[1]
			bad.SetFault(canned.Fault{Kind: canned.Status, Status: 503, Body: "{}"})
			eventually(t, "the mark", func() bool {
				s.chat(t.Context(), ask("hi"))
				return s.logged(t, markedDown) > 0
			})
			bad.SetFault(canned.Fault{})
			ctx, cancel := context.WithCancel(t.Context())
			t.Cleanup(cancel)
			holding := make(chan struct{}, 100)
			bad.SetHandler(func(w http.ResponseWriter, r *http.Request) {
				var head [1 << 10]byte
				n, _ := r.Body.Read(head[:])
				if r.Method == http.MethodPost && !strings.Contains(string(head[:n]), "hold") {
					w.Header().Set("Content-Type", "application/json")
					io.WriteString(w, wholeJSON)
					return
				}
				if r.Header.Get("Upgrade") != "" {
					w.Header().Set("Connection", "Upgrade")
					w.Header().Set("Upgrade", "websocket")
					w.WriteHeader(http.StatusSwitchingProtocols)
				}
				holding <- struct{}{}
				<-ctx.Done()
			})
			var all sync.WaitGroup
			t.Cleanup(all.Wait)
			t.Cleanup(cancel)
			eventually(t, "a request that lasts", func() bool {
				all.Go(func() { hold(ctx, s) })
				select {
				case <-holding:
					return true
				case <-time.After(100 * time.Millisecond):
					return false
				}
			})
			was := bad.Requests()
			eventually(t, "another request there", func() bool {
				s.mustChat(t, ask("hi"))
				return bad.Requests() > was+1
			})
		})
	}
}
