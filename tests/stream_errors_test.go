package tests

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// askedOf are requests for streams, by their API.
var askedOf = map[string]string{
	"/v1/chat/completions": `{"model":"m","stream":true,"messages":[{"role":"user","content":"q"}]}`,
	"/v1/completions":      `{"model":"m","stream":true,"prompt":"q"}`,
	"/v1/messages":         `{"model":"m","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"q"}]}`,
	"/v1/responses":        `{"model":"m","stream":true,"input":"q"}`,
	"/generate":            `{"text":"q","stream":true}`,
}

// beginnings are the first events of a stream with text.
var beginnings = map[string]string{
	"/v1/chat/completions": `data: {"id":"a","choices":[{"index":0,"delta":{"content":"so"},"finish_reason":null}]}` + "\n\n",
	"/v1/completions":      `data: {"id":"a","choices":[{"index":0,"text":"so","finish_reason":null}]}` + "\n\n",
	"/v1/messages":         `data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"so"}}` + "\n\n",
	"/v1/responses":        `data: {"type":"response.output_text.delta","delta":"so"}` + "\n\n",
	"/generate":            `data: {"text":"so","meta_info":{"finish_reason":null}}` + "\n\n",
}

// sends answers with a stream.
func sends(stream string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, stream)
		_ = http.NewResponseController(w).Flush()
	}
}

const (
	chatDone = "data: [DONE]\n\n"
	tooLong  = `data: {"error":{"object":"error","message":"The input (40000 tokens) is longer than the context","type":"BadRequestError","code":400}}` + "\n\n"
	dead     = `data: {"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","param":null,"code":500}}` + "\n\n"
)

// TestErrorsOfRequestsPassAtOnce has streams end with errors that each engine would find. The client gets
// the engine's bytes, computed once, and no worker is blamed.
func TestErrorsOfRequestsPassAtOnce(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	s := startCaddy(t, route(engines, "pool faulty", "engine vllm", "retry_budget 100% 1000/s"))
	streams := func(path, event string) {
		for _, before := range []string{"", ": ping\n\n", beginnings[path]} {
			for _, after := range []string{"", chatDone, event + chatDone} {
				setAll(engines, sends(before+event+after))
				asked := totalOf(engines)
				a := s.post(t.Context(), path, []byte(askedOf[path]))
				if n := totalOf(engines) - asked; n != 1 || a.err != nil || string(a.body) != before+event+after {
					t.Errorf("%s: %d engines were asked, error %v, body %q, want %q", path, n, a.err, a.body, before+event+after)
				}
			}
		}
	}
	for _, v := range []struct{ path, event string }{
		{"/v1/chat/completions", tooLong},
		{"/v1/chat/completions", `data: {"error":{"message":"x","type":"invalid_request_error","param":null,"code":"context_length_exceeded"}}` + "\n\n"},
		{"/v1/chat/completions", `error: {"code":400,"message":"x","type":"exceed_context_size_error"}` + "\n\n"},
		{"/v1/completions", tooLong},
		{"/v1/completions", "event: error\n" + `data: {"error":{"message":"x","type":"BAD_REQUEST","code":null}}` + "\n\n"},
		{"/v1/messages", "event: error\n" + `data: {"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long"}}` + "\n\n"},
		{"/v1/responses", "event: error\n" + `data: {"type":"error","code":"invalid_prompt","message":"x","param":null}` + "\n\n"},
		{"/v1/responses", `data: {"type":"response.failed","response":{"id":"r","status":"failed","error":{"code":"context_length_exceeded","message":"x"}}}` + "\n\n"},
		{"/generate", `data: {"error":{"message":"The input (40000 tokens) is longer than the context"}}` + "\n\n"},
		{"/generate", `data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"too long","status_code":400}}}` + "\n\n"},
	} {
		streams(v.path, v.event)
	}
	if s.logged(t, markedDown) > 0 {
		t.Error("a worker is marked down")
	}
	for _, w := range s.workers(t) {
		equal(t, w.Health.Errors, 0, "errors of worker %s", w.Dial)
	}
	// a worker whose peers answer without this error may lack the model
	streams("/v1/chat/completions", `data: {"object":"error","message":"x","type":"NotFoundError","param":null,"code":"404"}`+"\n\n")
	m := s.scrape(t)
	equal(t, m.value(resumedTotal, `pool="faulty"`)+m.value(stayedTotal, `pool="faulty"`), 0, "streams that count as broken")
	s.booksAtZero(t)
}

// totalOf returns how many requests the engines have got.
func totalOf(engines []*canned.Engine) (n int) {
	for _, e := range engines {
		n += e.Requests()
	}
	return n
}

// TestErrorsInHandNeverWait has streams end with engines' errors while the retry budget is spent.
func TestErrorsInHandNeverWait(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	setAll(engines, sends(dead+chatDone))
	s := startCaddy(t, route(engines, "pool inhand", "engine vllm", "retry_budget 0% 0.1/s"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for i := range 6 {
		if a := s.post(ctx, "/v1/chat/completions", storyBody(true, fmt.Sprint("q", i), "")); a.err != nil || string(a.body) != dead+chatDone {
			t.Fatalf("%d: %v, %q", i, a.err, a.body)
		}
	}
	if n := s.scrape(t).value(stayedTotal, `pool="inhand"`, `reason="budget"`); n == 0 {
		t.Error("the budget was not spent")
	}
	s.booksAtZero(t)
}

// TestErrorOfTheSecondEngine has a stream move, and end with the next engine's own error. Nothing
// follows that.
func TestErrorOfTheSecondEngine(t *testing.T) {
	created := `data: {"type":"response.created","response":{"id":"r","status":"in_progress","error":null}}` + "\n\n"
	for i, v := range []struct{ path, first, second, want string }{
		{"/v1/messages", `data: {"type":"error","error":{"type":"api_error","message":"one"}}`, `data: {"type":"error","error":{"type":"overloaded_error","message":"two"}}`, ""},
		{"/v1/messages", `data: {"type":"error","error":{"type":"api_error","message":"one"}}`, "event: error\n" + `data: {"type":"error","error":{"type":"invalid_request_error","message":"two"}}`, ""},
		{"/v1/responses", `data: {"type":"error","code":"server_error","message":"one"}`, `data: {"type":"error","code":"invalid_prompt","message":"two"}`, ""},
		{"/v1/responses", strings.TrimSpace(created), `data: {"type":"response.failed","response":{"status":"failed","error":{"code":"context_length_exceeded"}}}`, created},
		{"/v1/chat/completions", strings.TrimSpace(dead), `data: {"error":{"message":"two","code":500}}`, ""},
		{"/v1/chat/completions", strings.TrimSpace(beginnings["/v1/chat/completions"]), strings.TrimSpace(tooLong), beginnings["/v1/chat/completions"]},
		{"/v1/chat/completions", strings.TrimSpace(beginnings["/v1/chat/completions"]), `data: {"object":"error","message":"two","code":500}`, beginnings["/v1/chat/completions"]},
	} {
		engines := startEngines(t, 2, canned.Pace{})
		var asked atomic.Int32
		setAll(engines, func(w http.ResponseWriter, r *http.Request) {
			if n := asked.Add(1); n > 1 {
				sends(v.second+"\n\n")(w, r)
				return
			}
			sends(v.first+"\n\n")(w, r)
			if !strings.Contains(v.first, "one") && !strings.Contains(v.first, "EngineCore") {
				panic(http.ErrAbortHandler)
			}
		})
		s := startCaddy(t, route(engines, fmt.Sprint("pool second", i), "engine vllm", "retry_budget 100% 1000/s"))
		a := s.post(t.Context(), v.path, []byte(askedOf[v.path]))
		if string(a.body) != v.want+v.second+"\n\n" || a.err != nil || asked.Load() < 2 {
			t.Errorf("%s: %d engines were asked, error %v, %q, want %q", v.path, asked.Load(), a.err, a.body, v.want+v.second)
		}
		s.booksAtZero(t)
	}
}

// TestAborts has engines abort a stream with text. It ends there, unless the worker is about to leave.
func TestAborts(t *testing.T) {
	const abort = `data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}` + "\n\n"
	const failure = `data: {"error":{"message":"Generation aborted.","type":"INTERNAL_SERVER_ERROR","code":500}}` + "\n\n"
	for name, v := range map[string]struct {
		event string
		leave func(*server, *canned.Engine)
	}{
		"reason": {abort, nil},
		"error":  {failure, nil},
		"drained": {abort, func(s *server, e *canned.Engine) {
			s.api(t, http.MethodPost, "/pools/abort-drained/workers/"+e.Addr()+"/drain", nil, nil)
		}},
		"closes": {abort, func(_ *server, e *canned.Engine) { e.Refuse() }},
		"late": {abort, func(_ *server, e *canned.Engine) {
			time.AfterFunc(300*time.Millisecond, e.Refuse) // after the first looks at it
		}},
		"fails": {failure, func(_ *server, e *canned.Engine) { e.Refuse() }},
	} {
		t.Run(name, func(t *testing.T) {
			story := newStory(24)
			var asked atomic.Int32
			begun, leave := make(chan *canned.Engine, 1), make(chan struct{})
			engines := startEngines(t, 2, canned.Pace{})
			for _, e := range engines {
				e.SetHandler(inferencesOnly(func(w http.ResponseWriter, r *http.Request) {
					if asked.Add(1) > 1 {
						story.answer(w, r)
						return
					}
					_, _ = io.Copy(io.Discard, r.Body)
					w.Header().Set("Content-Type", "text/event-stream")
					_, _ = io.WriteString(w, `data: {"id":"a","choices":[{"index":0,"delta":{"content":"word and"},"finish_reason":null}]}`+"\n\n")
					_ = http.NewResponseController(w).Flush()
					begun <- e
					<-leave
					_, _ = io.WriteString(w, v.event+chatDone)
				}))
			}
			s := startCaddy(t, route(engines, "pool abort-"+name, "engine vllm", "retry_budget 100% 1000/s"))
			done := make(chan answer, 1)
			go func() { done <- s.post(t.Context(), "/v1/chat/completions", storyBody(true, "q?", "")) }()
			e := <-begun
			if v.leave != nil {
				v.leave(s, e)
			}
			close(leave)
			a := <-done
			g := readTold(a.body)
			if v.leave != nil {
				if a.err != nil || g.text != story.text() || g.finish != "stop" || g.done != 1 || g.bad != 0 {
					t.Errorf("it does not go on: %v, %v", a.err, g)
				}
			} else if a.err != nil || asked.Load() != 1 || g.text != "word and" || g.done != 1 || !strings.HasSuffix(string(a.body), v.event+chatDone) {
				t.Errorf("%d engines were asked, error %v, %q", asked.Load(), a.err, a.body)
			}
			if v.leave == nil && s.logged(t, markedDown) > 0 {
				t.Error("the worker is marked down")
			}
			s.booksAtZero(t)
		})
	}
}

// flushes sends parts of a stream, with pauses. It ends early if the router leaves.
func flushes(w http.ResponseWriter, r *http.Request, pause time.Duration, parts ...string) {
	_, _ = io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", "text/event-stream")
	for _, part := range parts {
		_, _ = io.WriteString(w, part)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-time.After(pause):
		}
	}
}

func setAll(engines []*canned.Engine, h http.HandlerFunc) {
	for _, e := range engines {
		e.SetHandler(h)
	}
}

// TestFirstTokenOfTheRest has an answer whose rest takes longer than the limit for the first token.
func TestFirstTokenOfTheRest(t *testing.T) {
	takesSeconds(t)
	s := newStory(40)
	s.pace = 100 * time.Millisecond
	caddy, _ := storyEngines(t, 3, s, "pool restfirst", "timeouts {\nfirst_token 2s\n}")
	a := caddy.post(t.Context(), "/v1/chat/completions", storyBody(true, "first?", ""), "X-Cut", "5")
	if g := readTold(a.body); a.err != nil || g.text != s.text() || g.done != 1 || caddy.logged(t, markedDown) > 1 {
		t.Errorf("%v, done %d times, %q", a.err, g.done, g.text)
	}
}

// TestDrainLeavesWhatCannotMove drains a worker with streams that cannot go on elsewhere.
func TestDrainLeavesWhatCannotMove(t *testing.T) {
	takesSeconds(t)
	parts := func(one, last string) []string {
		return append(strings.Split(strings.Repeat(one+"\x00", 15), "\x00"), last, "data: [DONE]\n\n")
	}
	for name, v := range map[string]struct {
		path, body string
		parts      []string
	}{
		"assistant": {
			"/v1/chat/completions", `{"model":"m","stream":true,"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"Sure:"}]}`,
			parts(`data: {"id":"a","choices":[{"index":0,"delta":{"content":" x"},"finish_reason":null}]}`+"\n\n",
				`data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`+"\n\n"),
		},
		"ids": {
			"/v1/completions", `{"model":"m","stream":true,"prompt":[1,2,3,4]}`,
			parts(`data: {"id":"a","choices":[{"index":0,"text":" x","finish_reason":null}]}`+"\n\n",
				`data: {"id":"a","choices":[{"index":0,"text":"","finish_reason":"stop"}]}`+"\n\n"),
		},
	} {
		engines := startEngines(t, 2, canned.Pace{})
		drained := make(chan struct{})
		setAll(engines, inferencesOnly(func(w http.ResponseWriter, r *http.Request) {
			flushes(w, r, 0, v.parts[:5]...)
			<-drained
			flushes(w, r, 100*time.Millisecond, v.parts[5:]...)
		}))
		pool := "drain" + name
		caddy := startCaddy(t, route(engines, "pool "+pool, "engine vllm", "retry_budget 100% 1000/s"))
		ended := make(chan answer, 1)
		go func() { ended <- caddy.post(t.Context(), v.path, []byte(v.body)) }()
		eventually(t, "the stream", func() bool { return engines[0].Active()+engines[1].Active() > 0 })
		for _, e := range engines {
			if e.Active() > 0 {
				caddy.api(t, http.MethodPost, "/pools/"+pool+"/workers/"+e.Addr()+"/drain?move", nil, nil)
			}
		}
		close(drained)
		if a := <-ended; a.err != nil || strings.Count(string(a.body), "[DONE]") != 1 || strings.Contains(string(a.body), brokenEvent) {
			t.Errorf("%s: %v, %q", name, a.err, a.body)
		}
	}
}

// TestRequestThatEndsEngines has a request that ends each engine that gets it, before its first token or
// behind it. Few engines get it.
func TestRequestThatEndsEngines(t *testing.T) {
	for _, tokens := range []int{0, 3} {
		engines := startEngines(t, 8, canned.Pace{})
		var asked atomic.Int32
		setAll(engines, func(w http.ResponseWriter, r *http.Request) {
			if asked.Add(1)%3 == 1 {
				text := strings.Repeat(`data: {"id":"a","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}`+"\n\n", tokens)
				flushes(w, r, 20*time.Millisecond, ": begins\n\n"+text)
			}
			panic(http.ErrAbortHandler)
		})
		caddy := startCaddy(t, route(engines, fmt.Sprint("pool ends", tokens), "engine vllm"))
		caddy.post(t.Context(), "/v1/chat/completions", storyBody(true, "ends engines", ""))
		if n := asked.Load(); n > 3 {
			t.Errorf("%d tokens: %d engines were asked", tokens, n)
		}
	}
}

// TestStreamsWithoutReasons ends streams whose engine gives neither a reason nor [DONE].
func TestStreamsWithoutReasons(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	setAll(engines, func(w http.ResponseWriter, r *http.Request) {
		flushes(w, r, 0, `data: {"id":"a","choices":[{"index":0,"text":" w0"}]}`+"\n\n", `data: {"id":"a","choices":[{"index":0,"text":" w1"}]}`+"\n\n")
	})
	caddy := startCaddy(t, route(engines, "pool noreasons", "engine other"))
	a := caddy.post(t.Context(), "/v1/completions", storyBody(false, "q?", ""))
	if a.err != nil || strings.Count(string(a.body), "w0") != 1 || caddy.logged(t, markedDown) > 0 {
		t.Errorf("%v, %q", a.err, a.body)
	}
}
