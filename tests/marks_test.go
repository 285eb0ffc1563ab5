package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// logged returns how many lines of Caddy's log contain the text.
func (s *server) logged(t testing.TB, text string) int {
	t.Helper()
	data, err := os.ReadFile(s.log)
	noError(t, err)
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
	s := startCaddy(t, behindProxy(engines, "fail_duration 30s"))
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
	noError(t, json.Unmarshal([]byte(page), &list))
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
			s := startCaddy(t, "kv_router "+dead.Addr()+" "+well.Addr()+" {\npolicy round_robin\n}")
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
			equal(t, turn("good", "next").engine(), home, "the session's engine")
		}},
		"OneClientsErrorEvents": {"", answers("text/event-stream", "data: {\"error\":{\"message\":\"The input is too long\",\"code\":400}}\n\ndata: [DONE]\n\n")},
		"TypeInCapitals":        {"", answers("Text/Event-Stream; charset=utf-8", oneChunk+"data: [DONE]\n\n")},
		"ByteOrderMark":         {"", answers("application/json", "\xef\xbb\xbf"+wholeJSON)},
		"NoType":                {"", answers("", "plain words")},
	} {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, 3, canned.Pace{})
			s := startCaddy(t, "kv_router {\npolicy round_robin\n"+affinity("hard")+"\nreverse_proxy "+addresses(engines)+" {\n"+v.proxy+"\n}\n}")
			v.do(t, s, engines)
			equal(t, s.logged(t, markedDown), 0, "workers marked down")
			s.booksAtZero(t)
		})
	}
}

// unworked are answers to a long prompt that an engine has not computed.
var unworked = map[string]http.HandlerFunc{
	"400":           refuseWith(http.StatusBadRequest),
	"413":           refuseWith(http.StatusRequestEntityTooLarge),
	"422":           refuseWith(http.StatusUnprocessableEntity),
	"402":           refuseWith(http.StatusPaymentRequired),
	"500":           refuseWith(http.StatusInternalServerError),
	"429 at last":   refuseWith(http.StatusTooManyRequests),
	"error in JSON": sendAs("application/json", `{"error":{"message":"too long","code":400}}`),
	"error event":   sendAs("text/event-stream", "data: {\"error\":{\"message\":\"too long\",\"code\":400}}\n\ndata: [DONE]\n\n"),
	"empty stream":  sendAs("text/event-stream", ""),
	"empty answer":  sendAs("application/json", `{"object":"chat.completion","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":0}}`),
}

func refuseWith(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		io.WriteString(w, `{"error":{"message":"no"}}`)
	}
}

// TestRefusedRequestsBookNothing has engines refuse a long prompt at once, some times. Nothing of it stays
// booked: the next choice takes the worker for as idle as it is.
func TestRefusedRequestsBookNothing(t *testing.T) {
	for name, refuse := range unworked {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, "pool default"))
			setAll(engines, refuse)
			for range 6 {
				c := ask(prose(rand.New(rand.NewPCG(1, 1)), 500_000, 500_000))
				c.Stream = strings.Contains(name, "stream") || strings.Contains(name, "event")
				s.chat(t.Context(), c, "X-Session-Id", "s")
			}
			s.booksAtZero(t)
			for _, c := range s.explain(t, ask("hi").body()).Candidates {
				if c.Wait != 0 || c.Active != 0 || c.Work > 1000 || c.Outlier {
					t.Errorf("after the refusals, %s has %+v", c.Dial, c)
				}
			}
		})
	}
}

// TestAgentStaysAfterAnOverflow has an agent whose third turn is too long for the model. It goes on with
// a summary at once, at the engine that has computed the beginning.
func TestAgentStaysAfterAnOverflow(t *testing.T) {
	s := startCaddy(t, route(startFleet(t, 2, engine.Config{MaxModelLen: 16_384, Speed: 5})))
	rng := rand.New(rand.NewPCG(2, 2))
	for i := range 4 {
		c := simChat(prose(rng, 30_000, 30_000))
		home := s.mustChat(t, c).engine()
		c.Messages = append(c.Messages, message{"assistant", "well"}, message{"user", "go on"})
		s.mustChat(t, c)
		tooLong := c
		tooLong.Messages = append(tooLong.Messages[:2:2], message{"user", prose(rng, 100_000, 100_000)})
		if a := s.chat(t.Context(), tooLong); a.status != http.StatusBadRequest {
			t.Fatalf("status %d, want 400", a.status)
		}
		c.Messages = append(c.Messages[:1:1], message{"assistant", "a summary"}, message{"user", "go on"})
		if a := s.mustChat(t, c); a.engine() != home {
			t.Errorf("agent %d: the turn after the refusal went to %s, not to %s", i, a.engine(), home)
		}
	}
}

// TestWorkerThatRefusesAllIsAnOutlier has one of four engines refuse all requests at once, beside engines
// that take their time. The admin API shows that its times are not to be believed.
func TestWorkerThatRefusesAllIsAnOutlier(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{FirstToken: 100 * time.Millisecond, Words: 2})
	s := startCaddy(t, route(engines))
	engines[0].SetHandler(refuseWith(http.StatusBadRequest))
	atOnce(16, func(client int) {
		rng := rand.New(rand.NewPCG(3, uint64(client))) //nolint:gosec // a test
		for range 5 {
			s.chat(t.Context(), ask(prose(rng, 2000, 4000)).streamed())
		}
	})
	outliers := 0
	for _, c := range s.explain(t, ask("hi").body()).Candidates {
		if c.Outlier {
			outliers++
		}
	}
	w := s.worker(t, engines[0].Addr())
	if outliers != 1 || !w.Load.Outlier || w.Health.ErrorsApart { // the errors may be the clients' mistakes, and are no alarm
		t.Errorf("%d outliers are explained, the admin API shows %+v", outliers, w)
	}
}
