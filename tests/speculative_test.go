package tests

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const (
	speculativeTotal = "caddy_kv_router_speculative_total"
	speculates       = "speculative_prefill"
	wantsPrefill     = `{"agent_hints":{"speculative_prefill":true}}`
)

// TestNextTurnIsFoundWarm has an engine that reasons before it answers. The next turn's
// prompt contains the answer without the reasoning, so the engine has not computed it.
// With the hint, the engine has it in its cache when the turn comes.
func TestNextTurnIsFoundWarm(t *testing.T) {
	e := startSimulated(t, engine.Config{AnswerTokens: 300, ReasoningTokens: 100})
	s := startCaddy(t, route([]*engine.Engine{e}, speculates, "response_headers X-KV-"))
	before := s.scrape(t)
	c := simChat(strings.Repeat("some words ", 100)).streamed()
	c.Nvext = json.RawMessage(wantsPrefill)
	session := []string{"X-Session-Id", "s", "Authorization", "Bearer client"}
	first := s.mustChat(t, c, session...)
	s.speculated(t, before, "ok", 1)
	s.booksAtZero(t)
	c.Messages = append(c.Messages, message{"assistant", first.text}, message{"user", "and then?"})
	a := s.mustChat(t, c, session...)
	var own, last engine.Record
	eventually(t, "the engine to have noted the ends", func() bool {
		for _, r := range e.Journal() {
			if r.Header.Get("User-Agent") == "kv_router" && r.Method == http.MethodPost {
				own = r
			} else if r.Method == http.MethodPost {
				last = r
			}
		}
		return own.Outcome == engine.Finished && last.Outcome == engine.Finished
	})
	if own.AnswerTokens != 1 || own.Header.Get("Authorization") != "Bearer client" {
		t.Errorf("the router's own request: %d tokens, %v", own.AnswerTokens, own.Header)
	}
	foreseen, _ := strconv.Atoi(a.header.Get("X-KV-Predicted-Cached-Tokens"))
	if last.PromptTokens < 400 || last.PromptTokens-last.CachedTokens > 60 || last.CachedTokens-foreseen > 60 {
		t.Errorf("of the second turn's %d tokens %d are cached, the router foresaw %d", last.PromptTokens, last.CachedTokens, foreseen)
	}
}

// ownRequests is an engine that separates the router's own requests from the clients'.
type ownRequests struct {
	addr   string
	answer http.HandlerFunc // of clients' requests; nil is a stream of one word
	hold   chan struct{}    // if not nil, its own requests are not answered before it is closed
	status int              // of its own; 0 is 200, -1 closes the connection

	mu   sync.Mutex
	own  []*http.Request
	body []string
	left int // that were called off
}

func startOwn(t *testing.T, e *ownRequests) *ownRequests {
	e.addr = serveRaw(t, e.serve)
	return e
}

func (e *ownRequests) serve(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	switch {
	case r.Method != http.MethodPost:
		http.NotFound(w, r)
	case r.UserAgent() != "kv_router" && e.answer != nil:
		e.answer(w, r)
	case r.UserAgent() != "kv_router":
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, streamOf(`{"content":"the answer"}`))
	default:
		e.serveOwn(w, r, string(body))
	}
}

func (e *ownRequests) serveOwn(w http.ResponseWriter, r *http.Request, body string) {
	e.mu.Lock()
	e.own = append(e.own, r)
	e.body = append(e.body, body)
	e.mu.Unlock()
	if e.hold != nil {
		select {
		case <-e.hold:
		case <-r.Context().Done():
			e.mu.Lock()
			e.left++
			e.mu.Unlock()
			return
		}
	}
	if e.status < 0 {
		panic(http.ErrAbortHandler) // closes the connection
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(max(e.status, 200))
	io.WriteString(w, `{"type":"message","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}]}`)
}

// counts returns how many requests of its own the router made, and how many of them it
// canceled.
func (e *ownRequests) counts() (own, left int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.own), e.left
}

// streamOf returns a complete stream of deltas.
func streamOf(deltas ...string) string {
	var b strings.Builder
	for _, d := range deltas {
		fmt.Fprintf(&b, "data: {\"choices\":[{\"index\":0,\"delta\":%s}]}\n\n", d)
	}
	b.WriteString("data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n")
	return b.String()
}

// turnOf returns a first turn whose client asks for a speculative prefill.
func turnOf(text string) []byte {
	return fmt.Appendf(nil, `{"model":"m","messages":[{"role":"user","content":%q}],"stream":true,"nvext":%s}`, text, wantsPrefill)
}

// speculated waits until the count of that outcome has grown by n, and checks that no
// other has.
func (s *server) speculated(t *testing.T, before metrics, outcome string, n float64) {
	t.Helper()
	s.wantFigures(t, before, []figure{{speculativeTotal, []string{`outcome="` + outcome + `"`}, n}, {speculativeTotal, nil, n}})
}

// TestSpeculativeRequestIsTheTurnWithItsAnswer checks the body of the speculative request.
func TestSpeculativeRequestIsTheTurnWithItsAnswer(t *testing.T) {
	const more = `,{"role":"assistant","content":"the \"answer\""},{"role":"user","content":"."}]`
	for _, c := range []struct{ name, path, body, answer, want string }{
		{
			"Chat", "/v1/chat/completions",
			`{"model":"m", "messages":[{"role":"user","content":"q"} ],"tools":[{"type":"function","function":{"name":"f"}}],"stream":true,"stream_options":{"include_usage":true},"max_completion_tokens":50,"temperature":0.5,"nvext":` + wantsPrefill + `}`,
			streamOf(`{"role":"assistant","content":""}`, `{"reasoning_content":"let me see"}`, `{"content":"the "}`, `{"content":"\"answer\""}`),
			`{"model":"m", "messages":[{"role":"user","content":"q"} ` + more + `,"tools":[{"type":"function","function":{"name":"f"}}],"temperature":0.5,"max_tokens":1,"stream":false}`,
		},
		{
			"Messages", "/v1/messages",
			`{"system":"be brief","messages":[{"role":"user","content":"q"}],"max_tokens":50,"thinking":{"type":"enabled","budget_tokens":9},"nvext":` + wantsPrefill + `}`,
			`{"type":"message","role":"assistant","content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"the \"answer\""}],"stop_reason":"end_turn","usage":{}}`,
			`{"system":"be brief","messages":[{"role":"user","content":"q"}` + more + `,"max_tokens":1,"stream":false}`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := startOwn(t, &ownRequests{answer: func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				if strings.HasPrefix(c.answer, "data:") {
					w.Header().Set("Content-Type", "text/event-stream")
				}
				io.WriteString(w, c.answer)
			}})
			s := startCaddy(t, "kv_router "+e.addr+" {\n"+speculates+"\ninject_usage\nworker * {\nengine vllm\ndp_size 2\n}\n}")
			before := s.scrape(t)
			a := s.post(t.Context(), c.path, []byte(c.body), "X-Request-Id", "1", "Authorization", "Bearer client", "Idempotency-Key", "k")
			if a.status != http.StatusOK || a.err != nil {
				t.Fatalf("status %d, error %v, body %s", a.status, a.err, a.body)
			}
			s.speculated(t, before, "ok", 1)
			r := e.own[0]
			if e.body[0] != c.want || r.URL.Path != c.path || int64(len(e.body[0])) != r.ContentLength {
				t.Errorf("to %s, length %d:\n%s, want\n%s", r.URL.Path, r.ContentLength, e.body[0], c.want)
			}
			for name, want := range map[string]bool{
				"Authorization": true, "X-Data-Parallel-Rank": true, "X-Request-Id": false, "Idempotency-Key": false,
			} {
				if (r.Header.Get(name) != "") != want {
					t.Errorf("%s: %q", name, r.Header.Get(name))
				}
			}
			s.booksAtZero(t)
		})
	}
}

// TestSpeculativePrefillIsLeftOut has turns that get no speculative prefill, each for its
// reason.
func TestSpeculativePrefillIsLeftOut(t *testing.T) {
	stream := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, body)
		}
	}
	chatOf := func(member string) string {
		return `{"messages":[{"role":"user","content":"q"}],"stream":true` + member + `,"nvext":` + wantsPrefill + `}`
	}
	const chatPath = "/v1/chat/completions"
	well := streamOf(`{"content":"a"}`)
	for _, c := range []struct {
		name, option, path, body string
		answer                   http.HandlerFunc
		outcome                  string
		n                        float64
	}{
		{"NotAllowed", "speculative_prefill off", chatPath, chatOf(""), stream(well), "off", 1},
		{"NotAsked", speculates, chatPath, `{"messages":[{"role":"user","content":"q"}],"stream":true}`, stream(well), "off", 0},
		{"ToolCall", speculates, chatPath, chatOf(""), stream(streamOf(`{"tool_calls":[{"index":0,"id":"1","function":{"name":"f","arguments":"{}"}}]}`)), "unfit", 1},
		{"Broken", speculates, chatPath, chatOf(""), cut(nil, oneChunk), "unfit", 1},
		{"EndsWithAnError", speculates, chatPath, chatOf(""), stream(oneChunk + "data: {\"error\":{\"message\":\"m\"}}\n\ndata: [DONE]\n\n"), "unfit", 1},
		{"Error", speculates, chatPath, chatOf(""), func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadRequest) }, "unfit", 1},
		{"SeveralAnswers", speculates, chatPath, chatOf(`,"n":2`), stream(well), "unfit", 1},
		{"SessionOfTheEngine", speculates, chatPath, chatOf(`,"session_params":{"id":"s"}`), stream(well), "unfit", 1},
		{"LongAnswer", speculates, chatPath, chatOf(""), stream(streamOf(`{"content":"` + strings.Repeat("x", 300<<10) + `"}`)), "unfit", 1},
		{"AnswerAboveOneStep", speculates, chatPath, chatOf(""), stream(streamOf(`{"content":"` + strings.Repeat("some words ", 2<<10) + `"}`)), "unfit", 1},
		{"Completion", speculates, "/v1/completions", `{"prompt":"q","nvext":` + wantsPrefill + `}`, stream(well), "unfit", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := startOwn(t, &ownRequests{answer: c.answer})
			s := startCaddy(t, "kv_router "+e.addr+" {\n"+c.option+"\n}")
			before := s.scrape(t)
			s.post(t.Context(), c.path, []byte(c.body))
			s.booksAtZero(t)
			s.speculated(t, before, c.outcome, c.n)
			if own, _ := e.counts(); own != 0 {
				t.Errorf("the engine was sent %v", e.body)
			}
			eventually(t, "the bodies to be let go of", func() bool { return s.bodyBytes(t) == 0 })
		})
	}
}

func (s *server) bodyBytes(t *testing.T) (n int64) {
	t.Helper()
	var p struct {
		Bodies      int64 `json:"request_body_bytes"`
		Speculative int64 `json:"speculative_prefills"`
	}
	s.api(t, http.MethodGet, defaultPool, nil, &p)
	return p.Bodies + p.Speculative
}

// TestBusyWorkerIsLeftAlone ends a turn on a worker with a limit of two and another active
// request.
func TestBusyWorkerIsLeftAlone(t *testing.T) {
	goOn := make(chan struct{})
	e := startOwn(t, &ownRequests{})
	e.answer = func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		if r.Header.Get("X-Slow") != "" {
			io.WriteString(w, oneChunk)
			http.NewResponseController(w).Flush()
			select {
			case <-goOn:
			case <-r.Context().Done():
			}
		}
		io.WriteString(w, streamOf(`{"content":"a"}`))
	}
	s := startCaddy(t, "kv_router "+e.addr+" {\n"+speculates+"\n"+maxRunning(2)+"\n}")
	before := s.scrape(t)
	slow := s.start(t, "/v1/chat/completions", string(ask("slow").streamed().body()), "X-Slow", "1")
	eventually(t, "the other request to run", func() bool { return s.scrape(t).value(workerRequests) == 1 })
	s.post(t.Context(), "/v1/chat/completions", turnOf("a turn"))
	s.speculated(t, before, "busy", 1)
	close(goOn)
	slow.wait(t)
	s.booksAtZero(t)
	s.post(t.Context(), "/v1/chat/completions", turnOf("a turn"))
	s.wantFigures(t, before, []figure{{speculativeTotal, []string{`outcome="ok"`}, 1}})
	if own, _ := e.counts(); own != 1 {
		t.Errorf("%d requests of the router's own, want 1", own)
	}
}

// TestWhatEndsASpeculativePrefill has one that the engine does not answer.
func TestWhatEndsASpeculativePrefill(t *testing.T) {
	long := strings.Repeat("some words ", 100)
	for _, c := range []struct {
		name, option string
		then         func(t *testing.T, s *server, site string)
		outcome      string
	}{
		{"NoAnswer", maxRunning(2), func(t *testing.T, s *server, _ string) {
			s.mustPost(t, ask("another client").streamed().body())
		}, "timeout"},
		{"Reload", "", func(t *testing.T, s *server, site string) {
			s.mustReload(t, site+"\nheader X-New 1")
		}, "stopped"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := startOwn(t, &ownRequests{hold: make(chan struct{})})
			site := "kv_router " + e.addr + " {\n" + speculates + "\n" + c.option + "\n}"
			s := startCaddy(t, site)
			before := s.scrape(t)
			s.mustPost(t, turnOf(long))
			eventually(t, "the prefix to be computed", func() bool { own, _ := e.counts(); return own == 1 })
			if m := s.scrape(t); m.value(leases) != 1 || m.value(workerRequests) != 1 {
				t.Errorf("%v leases and %v requests are booked for it", m.value(leases), m.value(workerRequests))
			}
			c.then(t, s, site)
			s.speculated(t, before, c.outcome, 1)
			eventually(t, "the engine to be told", func() bool { _, left := e.counts(); return left == 1 })
			s.booksAtZero(t)
			equal(t, s.bodyBytes(t), 0, "bytes of bodies")
		})
	}
}

// TestSpeculativePrefillThatFails is not retried, and its failure affects nothing
// else. No worker is marked down, and no request is counted.
func TestSpeculativePrefillThatFails(t *testing.T) {
	for name, status := range map[string]int{"Refused": 400, "Full": 503, "Died": -1} {
		t.Run(name, func(t *testing.T) {
			e := startOwn(t, &ownRequests{status: status})
			s := startCaddy(t, "kv_router "+e.addr+" "+serveRaw(t, (&ownRequests{}).serve)+" {\n"+speculates+"\npolicy round_robin\npool failed-"+name+"\n}")
			before := s.scrape(t)
			for range 2 { // one of the two goes to either
				s.mustPost(t, turnOf("a turn"))
			}
			pool := `pool="failed-` + name + `"`
			s.wantFigures(t, before, []figure{
				{speculativeTotal, []string{pool, `outcome="failed"`}, 1},
				{speculativeTotal, []string{pool, `outcome="ok"`}, 1},
				{requestsTotal, []string{pool}, 2},
				{requestsTotal, []string{pool, `outcome="ok"`}, 2},
				{retriesTotal, []string{pool}, 0},
			})
			s.booksAtZero(t)
			if own, _ := e.counts(); own != 1 {
				t.Errorf("%d requests of the router's own, want 1", own)
			}
			equal(t, s.logged(t, markedDown), 0, "workers marked down")
			equal(t, len(s.conditions(t, "speculative prefills fail")), 1, "lines in the log")
			if v := s.scrape(t).value("caddy_kv_router_incidents", pool, `condition="speculative prefills fail"`); v != 1 {
				t.Error("no incident")
			}
		})
	}
}

// TestSpeculativePrefillsAreBounded ends four turns together. Together they would exceed
// the limit of speculative prefills of one worker.
func TestSpeculativePrefillsAreBounded(t *testing.T) {
	var here atomic.Int32
	e := startOwn(t, &ownRequests{hold: make(chan struct{}), answer: func(w http.ResponseWriter, r *http.Request) {
		here.Add(1)
		for here.Load() < 4 && r.Context().Err() == nil { // for all to be there
			pausing(r.Context(), time.Millisecond)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, streamOf(`{"content":"the answer"}`))
	}})
	s := startCaddy(t, "kv_router "+e.addr+" {\n"+speculates+"\n}")
	before := s.scrape(t)
	var turns sync.WaitGroup
	for i := range 4 {
		turns.Go(func() { s.mustPost(t, turnOf(fmt.Sprintf("turn %d", i))) })
	}
	turns.Wait()
	s.wantFigures(t, before, []figure{{speculativeTotal, []string{`outcome="limit"`}, 2}})
	eventually(t, "two prefixes to be computed", func() bool {
		own, _ := e.counts()
		return own == 2
	})
	close(e.hold)
	s.wantFigures(t, before, []figure{{speculativeTotal, []string{`outcome="ok"`}, 2}, {speculativeTotal, nil, 4}})
	s.booksAtZero(t)
}
