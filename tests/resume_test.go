package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/tidwall/gjson"
)

const (
	resumedTotal = "caddy_kv_router_resumed_total"
	stayedTotal  = "caddy_kv_router_resume_refused_total"
)

// story is an engine's answer, which depends on the question alone. The engine goes on with it
// where a partial answer ends.
type story struct {
	pieces []string // tokens
	cuts   sync.Map // questions whose streams were cut, to how often
	pace   time.Duration
}

// newStory has every kind of place: white space at the end of pieces, characters of several
// bytes, and what JSON escapes.
func newStory(n int) *story {
	s := new(story)
	kinds := []string{"word", " and", " more", "\n\n", " \"so\"", " žluťoučký", "日本", " \\tab\t", " 🙂", " ", "##"}
	for i := range n {
		s.pieces = append(s.pieces, kinds[i%len(kinds)])
	}
	return s
}

func (s *story) text() string { return strings.Join(s.pieces, "") }

// ask is what the engine reads of a request.
type storyRequest struct {
	Messages []struct{ Role, Content string }
	Prompt   string
	Max      int  `json:"max_tokens"`
	Goes     bool `json:"continue_final_message"`
	Options  struct {
		Usage bool `json:"include_usage"`
	} `json:"stream_options"`
}

// answer is a canned.Engine's handler. The header X-Cut says after how many events the engine
// cuts a stream that begins, and X-How says how. With X-Twice it cuts the rest, too.
func (s *story) answer(w http.ResponseWriter, r *http.Request) {
	var q storyRequest
	body, _ := io.ReadAll(r.Body)
	if err := json.Unmarshal(body, &q); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	chat := strings.HasSuffix(r.URL.Path, "/chat/completions")
	question, so := q.Prompt, ""
	if chat {
		question = q.Messages[0].Content
		if last := q.Messages[len(q.Messages)-1]; q.Goes && last.Role == "assistant" {
			so = last.Content
		} else if q.Goes || last.Role == "assistant" {
			http.Error(w, "nothing to go on with", http.StatusBadRequest)
			return
		}
	} else if at := strings.Index(question, "?"); at >= 0 {
		question, so = question[:at+1], question[at+1:]
	}
	if !strings.HasPrefix(s.text(), so) {
		http.Error(w, "not the beginning of the answer: "+so, http.StatusBadRequest)
		return
	}
	events, done := s.events(chat, so, &q)
	cut := len(events)
	before, _ := s.cuts.LoadOrStore(question, new(atomic.Int32))
	if at := r.Header.Get("X-Cut"); at != "" {
		if n := before.(*atomic.Int32).Add(1); n == 1 || n == 2 && r.Header.Get("X-Twice") != "" {
			fmt.Sscan(at, &cut)
			if n == 2 {
				cut = min(cut, 3, len(events)-1)
			}
			cut = min(cut, len(events))
		} else {
			at, cut = "", len(events)
		}
		if at != "" {
			done = false
		}
	}
	w.Header().Set("Content-Type", "text/event-stream")
	ctl := http.NewResponseController(w)
	ctl.Flush()
	for _, e := range events[:cut] {
		io.WriteString(w, e)
		ctl.Flush()
		if s.pace > 0 {
			time.Sleep(s.pace)
		}
	}
	if done {
		return
	}
	switch how := r.Header.Get("X-How"); how {
	case "end":
	case "stall":
		<-r.Context().Done()
	case "error":
		io.WriteString(w, "data: {\"error\":{\"message\":\"EngineCore died\",\"code\":500}}\n\ndata: [DONE]\n\n")
	default:
		if strings.HasPrefix(how, "half") && cut < len(events) {
			io.WriteString(w, events[cut][:len(events[cut])/2])
			ctl.Flush()
		}
		if how != "half end" {
			panic(http.ErrAbortHandler)
		}
	}
}

// events returns the events of the answer after so.
func (s *story) events(chat bool, so string, q *storyRequest) (list []string, done bool) {
	event := func(v any) {
		b, _ := json.Marshal(v)
		list = append(list, "data: "+string(b)+"\n\n")
	}
	type m = map[string]any
	id := fmt.Sprintf("id-%d", rand.Int())
	chunk := func(more m) {
		c := m{"id": id, "object": "chat.completion.chunk", "created": rand.IntN(1 << 30), "model": "m"}
		for k, v := range more {
			c[k] = v
		}
		event(c)
	}
	piece := func(text string, finish any) {
		c := m{"index": 0, "text": text, "finish_reason": finish}
		if chat {
			delete(c, "text")
			c["delta"] = m{"content": text}
			if text == "" {
				c["delta"] = m{}
			}
		}
		chunk(m{"choices": []m{c}})
	}
	if chat {
		chunk(m{"choices": []m{{"index": 0, "delta": m{"role": "assistant", "content": ""}, "finish_reason": nil}}})
	}
	given, n, at := 0, 0, len(so)
	reason := "stop"
	for _, p := range s.pieces {
		if at >= len(p) {
			at -= len(p)
			given++
			continue
		}
		if q.Max > 0 && n == q.Max {
			reason = "length"
			break
		}
		piece(p[at:], nil)
		at = 0
		n++
	}
	piece("", reason)
	if q.Options.Usage {
		chunk(m{"choices": []m{}, "usage": m{
			"prompt_tokens": 10 + given, "completion_tokens": n, "total_tokens": 10 + given + n,
			"prompt_tokens_details": m{"cached_tokens": 3},
		}})
	}
	return append(list, "data: [DONE]\n\n"), true
}

// told is what a client got of a stream.
type told struct {
	text, finish     string
	ids              map[string]bool
	roles, done, bad int
	usage            gjson.Result
}

// String leaves out the usage.
func (g told) String() string {
	return fmt.Sprintf("%q, ids %d, roles %d, finish %q, done %d, bad %d", g.text, len(g.ids), g.roles, g.finish, g.done, g.bad)
}

func readTold(body []byte) (g told) {
	g.ids = make(map[string]bool)
	for _, e := range strings.Split(string(body), "\n\n") {
		data, ok := strings.CutPrefix(e, "data: ")
		switch {
		case data == "[DONE]":
			g.done++
			continue
		case !ok || !gjson.Valid(data):
			if strings.TrimSpace(e) != "" && !strings.HasPrefix(e, ":") {
				g.bad++
			}
			continue
		}
		v := gjson.Parse(data)
		if v.Get("error").Exists() {
			g.bad++
			continue
		}
		g.ids[v.Get("id").Str] = true
		c := v.Get("choices.0")
		g.text += c.Get("delta.content").Str + c.Get("text").Str
		if c.Get("delta.role").Exists() {
			g.roles++
		}
		if f := c.Get("finish_reason"); f.Str != "" {
			g.finish += f.Str
		}
		if u := v.Get("usage"); u.IsObject() {
			g.usage = u
		}
	}
	return g
}

// storyEngines starts engines that tell a story, and a Caddy before them.
func storyEngines(t testing.TB, n int, s *story, block ...string) (*server, []*canned.Engine) {
	t.Helper()
	engines := startEngines(t, n, canned.Pace{})
	setAll(engines, s.answer)
	return startCaddy(t, route(engines, append([]string{"engine vllm", "retry_budget 100% 1000/s"}, block...)...)), engines
}

func storyBody(chat bool, question, more string) []byte {
	if chat {
		return fmt.Appendf(nil, `{"model":"m","stream":true,"messages":[{"role":"user","content":%q}]%s}`, question, more)
	}
	return fmt.Appendf(nil, `{"model":"m","stream":true,"prompt":%q%s}`, question, more)
}

// TestStreamsGoOn cuts streams at every place and in every way. Each client sees one whole stream.
func TestStreamsGoOn(t *testing.T) {
	s := newStory(24)
	caddy, _ := storyEngines(t, 3, s, "timeouts {\nstream_idle 4s\nfirst_token 4s\n}")
	paths := map[bool]string{true: "/v1/chat/completions", false: "/v1/completions"}
	var all sync.WaitGroup
	slots := make(chan struct{}, 16)
	for _, chat := range []bool{true, false} {
		for _, how := range []string{"close", "half", "end", "half end", "error", "stall"} {
			events := len(s.pieces) + 2 // and usage
			if chat {
				events++
			}
			for cut := range events {
				for _, twice := range []string{"", "yes"} {
					if how == "stall" && cut%9 != 2 {
						continue // each takes seconds
					}
					all.Go(func() {
						slots <- struct{}{}
						defer func() { <-slots }()
						name := fmt.Sprintf("%v %s after %d %s?", chat, how, cut, twice)
						body := storyBody(chat, name, `,"max_tokens":100,"stop":["##END"],"stream_options":{"include_usage":true}`)
						a := caddy.post(t.Context(), paths[chat], body, "X-Cut", fmt.Sprint(cut), "X-How", how, "X-Twice", twice)
						g := readTold(a.body)
						if cut < 2 && twice != "" && chat || cut == 0 && twice != "" {
							if g.done != 0 && how != "error" { // twice without a token: the request may be what ends engines
								t.Errorf("%s: it went on: %q", name, a.body)
							}
							return
						}
						roles := 0
						if chat {
							roles = 1
						}
						u := g.usage
						if cut >= events-3 && !u.Exists() { // only that is missing: the router ends the stream itself
							u = gjson.Parse(`{"prompt_tokens":10,"completion_tokens":24,"total_tokens":34}`)
						}
						if a.err != nil || g.text != s.text() || g.finish != "stop" || g.done != 1 || g.bad != 0 || g.roles != roles || len(g.ids) != 1 ||
							// a token of which the engine writes the end again may count once more
							u.Get("completion_tokens").Int() < 24 || u.Get("completion_tokens").Int() > 26 || u.Get("total_tokens").Int() != 34 ||
							u.Get("prompt_tokens").Int() != 34-u.Get("completion_tokens").Int() {
							t.Errorf("%s: error %v, %+v, usage %s, want %q\n%s", name, a.err, g, u.Raw, s.text(), a.body)
						}
					})
				}
			}
		}
	}
	all.Wait()
	caddy.booksAtZero(t)
}

// TestStreamsThatStay breaks streams that cannot go on elsewhere. They end with an error event, and
// are counted.
func TestStreamsThatStay(t *testing.T) {
	const token = `data: {"id":"a","choices":[{"index":0,"delta":{%s},"finish_reason":null}]}` + "\n\n"
	content := fmt.Sprintf(token, `"content":"so"`)
	for _, v := range []struct{ reason, more, events string }{
		{"choices", `,"n":2`, content},
		{"choices", `,"use_beam_search":true`, content},
		{"format", `,"response_format":{"type":"json_object"}`, content},
		{"format", `,"structured_outputs":{"regex":"a"}`, content},
		{"format", `,"tool_choice":"required"`, content},
		{"logprobs", `,"logprobs":true`, content},
		{"reasoning", ``, fmt.Sprintf(token, `"reasoning_content":"hm"`)},
		{"reasoning", ``, fmt.Sprintf(token, `"content":"<think>hm"`)},
		{"tool_call", ``, content + fmt.Sprintf(token, `"tool_calls":[{"index":0,"id":"x","function":{"name":"f","arguments":""}}]`)},
		{"unreadable", ``, content + "data: what\n\n"},
		{"length", ``, fmt.Sprintf(token, `"content":"`+strings.Repeat("x", 100)+`"`)},
	} {
		t.Run(v.reason, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			for _, e := range engines {
				e.SetHandler(cut(nil, v.events))
			}
			s := startCaddy(t, route(engines, "pool "+v.reason, "engine vllm", "resume {\ntokens 10\n}"))
			a := s.post(t.Context(), "/v1/chat/completions", storyBody(true, "hi", v.more))
			n := s.scrape(t).value(stayedTotal, `pool="`+v.reason+`"`, `reason="`+v.reason+`"`)
			if !strings.HasPrefix(string(a.body), v.events) || strings.Count(string(a.body), brokenEvent) != 1 || n == 0 || engines[0].Requests()+engines[1].Requests() != 1 {
				t.Errorf("%s %s: counted %v, %d requests, body %q", v.reason, v.more, n, engines[0].Requests()+engines[1].Requests(), a.body)
			}
			s.booksAtZero(t)
		})
	}
}

// TestBeginningsPassAtOnce reads the header, a comment and the role event long before a token.
func TestBeginningsPassAtOnce(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	for _, e := range engines {
		e.SetHandler(stall(nil, ": ping\n\n", oneRole))
	}
	s := startCaddy(t, route(engines))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp := s.mustOpen(ctx, t, atChat, storyBody(true, "hi", ""))
	got := make([]byte, len(": ping\n\n"+oneRole))
	if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != ": ping\n\n"+oneRole {
		t.Errorf("%v, %q", err, got)
	}
	cancel()
	s.booksAtZero(t)
}

// TestDrainedStreamsMove drains a worker with `move` while streams run on it.
func TestDrainedStreamsMove(t *testing.T) {
	s := newStory(60)
	caddy, engines := storyEngines(t, 2, s, "pool moves", "policy round_robin")
	engines[0].SetHandler(func(w http.ResponseWriter, r *http.Request) {
		r.Header.Set("X-Cut", "10")
		r.Header.Set("X-How", "stall") // until they move
		s.answer(w, r)
	})
	var all sync.WaitGroup
	before := caddy.scrape(t)
	const streams = 40
	for i := range streams {
		all.Go(func() {
			a := caddy.post(t.Context(), "/v1/chat/completions", storyBody(true, fmt.Sprint("drain ", i, "?"), ""))
			if g := readTold(a.body); a.err != nil || g.text != s.text() || g.done != 1 || g.bad != 0 {
				t.Errorf("%v, %+v", a.err, g)
			}
		})
	}
	const path = "/pools/moves/workers/"
	eventually(t, "all to have tokens", func() bool {
		return caddy.scrape(t).value(firstToken+"_count") >= before.value(firstToken+"_count")+streams
	})
	there := float64(engines[0].Requests())
	caddy.api(t, http.MethodPost, path+engines[0].Addr()+"/drain?move", nil, nil)
	all.Wait()
	if there == 0 {
		t.Error("no stream was there")
	}
	caddy.wantFigures(t, before, []figure{
		{resumedTotal, []string{`pool="moves"`, `cause="drain"`, `outcome="ok"`}, there},
		{workerOutcomes, []string{`pool="moves"`, `outcome="drained"`}, there},
		{workerOutcomes, []string{`pool="moves"`, `outcome="resumed"`}, 0},
	})
	if n, broken := caddy.logged(t, markedDown), caddy.conditions(t, "streams break off"); n != 0 || len(broken) != 0 {
		t.Errorf("%d workers were marked down for it, conditions %v", n, broken)
	}
	caddy.booksAtZero(t)
}

// TestNoStreamIsCut kills engines at random under load. All streams are whole.
func TestNoStreamIsCut(t *testing.T) {
	takesSeconds(t)
	level := runtime.NumGoroutine()
	s := newStory(60)
	s.pace = time.Millisecond
	caddy, engines := storyEngines(t, 4, s, "pool cut", "resume {\ntries 20\n}")
	ctx, stop := context.WithCancel(t.Context())
	var killer, clients sync.WaitGroup
	var next, cut, failed atomic.Int32
	pass := func() { // some answers, however fast the machine is
		for until := next.Load() + 10 + rand.Int32N(40); ctx.Err() == nil && next.Load() < until; {
			pausing(ctx, time.Millisecond)
		}
	}
	killer.Go(func() {
		for ctx.Err() == nil {
			e := engines[rand.IntN(len(engines))]
			e.Kill()
			pass()
			if err := e.Restart(); err != nil {
				t.Error(err)
			}
			pass()
		}
	})
	total := 1000
	if inLong {
		total = 10000
	}
	for range 64 {
		clients.Go(func() {
			for {
				i := int(next.Add(1))
				if i > total {
					return
				}
				a := caddy.post(t.Context(), "/v1/chat/completions", storyBody(true, fmt.Sprint("stream ", i, "?"), ""))
				g := readTold(a.body)
				switch {
				case a.status != http.StatusOK:
					failed.Add(1) // before a header: two engines have died of it, as far as the router knows
				case a.err != nil || g.text != s.text() || g.done != 1 || g.roles != 1 || g.bad != 0:
					if cut.Add(1) < 4 {
						t.Errorf("stream %d: %v, %+v\n%.3000s", i, a.err, g, a.body)
					}
				}
			}
		})
	}
	clients.Wait()
	stop()
	killer.Wait()
	m := caddy.scrape(t)
	resumed := m.value(resumedTotal, `pool="cut"`, `outcome="ok"`)
	t.Logf("%d streams: %v resumed, %d cut, %d without a header", total, resumed, cut.Load(), failed.Load())
	if resumed == 0 {
		t.Error("no stream went on elsewhere")
	}
	caddy.booksAtZero(t)
	goroutines(t, caddy, engines, level)
}

// TestBeginningsMoveInOtherAPIs cuts streams behind their first event. The client gets that once.
func TestBeginningsMoveInOtherAPIs(t *testing.T) {
	for _, v := range []struct{ path, body, first, begins, ends string }{
		{
			"/v1/messages", `{"model":"canned","max_tokens":9,"stream":true,"messages":[{"role":"user","content":"hi"}]}`,
			"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"1\",\"usage\":{\"input_tokens\":1}}}\n\n",
			`"type":"message_start"`, `"type":"message_stop"`,
		},
		{
			"/v1/responses", `{"model":"canned","stream":true,"input":"hi"}`,
			"event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"1\"}}\n\n",
			`"type":"response.created"`, `"type":"response.completed"`,
		},
		{"/v1/chat/completions", string(storyBody(true, "hi", "")), ": ping\n\n" + oneRole, `"role"`, "data: [DONE]"},
	} {
		t.Run(strings.ReplaceAll(v.path[4:], "/", "-"), func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, "pool begins"+v.path[4:6], "policy round_robin"))
			engines[0].SetHandler(cut(nil, v.first))
			for range 2 { // one of them begins there
				a := s.post(t.Context(), v.path, []byte(v.body))
				for _, once := range []string{v.begins, v.ends} {
					if n := strings.Count(string(a.body), once); n != 1 || a.err != nil {
						t.Errorf("%v, %d times %s\n%s", a.err, n, once, a.body)
					}
				}
			}
			equal(t, s.scrape(t).value(resumedTotal, `pool="begins`+v.path[4:6]+`"`, `way="whole"`, `outcome="ok"`), 1, "streams that moved")
			equal(t, s.scrape(t).value(workerOutcomes, `pool="begins`+v.path[4:6]+`"`, `outcome="resumed"`), 1, "streams that broke off at their worker")
			s.booksAtZero(t)
		})
	}
}
