package engine

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// startSGLang starts an SGLang with streaming sessions.
func startSGLang(t *testing.T, cfg Config) *Engine {
	t.Helper()
	cfg.Flavour, cfg.StreamingSessions = SGLang, true
	return start(t, cfg)
}

func (e *Engine) openBy(t *testing.T, id string, timeout float64) reply {
	t.Helper()
	return post(t.Context(), e.URL()+OpenPath, doc{"capacity_of_str_len": 65536, "session_id": id, "streaming": true, "timeout": timeout})
}

func (e *Engine) mustOpen(t *testing.T, id string) {
	t.Helper()
	if v := e.openBy(t, id, 600).json(t); v != id {
		t.Fatalf("opened %v", v)
	}
}

func (e *Engine) closeBy(t *testing.T, id string) reply {
	t.Helper()
	return post(t.Context(), e.URL()+ClosePath, doc{"session_id": id})
}

// say continues a session by /generate, with a few new tokens. more overrides members.
func (e *Engine) say(ctx context.Context, id string, first, n int, more doc) reply {
	d := doc{"input_ids": tokens(first, n), "session_params": doc{"id": id}, "sampling_params": doc{"max_new_tokens": 8}}
	for k, v := range more {
		d[k] = v
	}
	return post(ctx, e.URL()+"/generate", d)
}

// counts returns the tokens of an answer of /generate: prompt, cached ones, answer.
func counts(v any) [3]int {
	m := at(v, "meta_info")
	return [3]int{number(at(m, "prompt_tokens")), number(at(m, "cached_tokens")), number(at(m, "completion_tokens"))}
}

// results are what became of the requests at a path, or of a session in all requests.
func (e *Engine) results(of string) (out []string) {
	for _, r := range e.Journal() {
		if r.Session != "" && (r.Path == of || r.Session == of) {
			out = append(out, string(r.SessionResult))
		}
	}
	return out
}

// TestSessionGoesOn sends only the new tokens of each turn. The answers have the tokens
// of all turns before as cached ones, which nobody else finds.
func TestSessionGoesOn(t *testing.T) {
	e := startSGLang(t, Config{AnswerTokens: 8})
	if v := get(t.Context(), e.URL()+"/server_info").json(t); at(v, "enable_streaming_session") != true {
		t.Errorf("the engine does not say that it has sessions: %v", v)
	}
	e.mustOpen(t, "s")
	if v := e.say(t.Context(), "s", 0, 40, nil).json(t); counts(v) != [3]int{40, 0, 8} || at(v, "meta_info", "finish_reason", "type") != "stop" {
		t.Errorf("first turn %v", v)
	}
	v := e.say(t.Context(), "s", 1000, 5, nil).json(t)
	if counts(v) != [3]int{53, 48, 8} {
		t.Errorf("second turn %v", v)
	}
	again := append(slices.Concat(tokens(0, 40)), 0)
	if w := e.say(t.Context(), "s", 2000, 7, doc{"stream": true}); !strings.HasSuffix(string(w.body), "data: [DONE]\n\n") {
		t.Errorf("third turn %s", w.body)
	} else if events, _ := w.events(t); counts(events[7]) != [3]int{68, 61, 8} || at(events[0], "meta_info", "finish_reason") != nil {
		t.Errorf("third turn %v", events)
	}
	if s := e.State().Ranks[0]; s.Sessions != 1 || s.SessionBlocks != 5 || s.UsedBlocks != 5 {
		t.Errorf("state %+v", s)
	}
	// the first prompt is in the cache, nothing else is
	if got := counts(post(t.Context(), e.URL()+"/generate", doc{"input_ids": again, "sampling_params": doc{"max_new_tokens": 1}}).json(t)); got[1] != 32 {
		t.Errorf("%v of the first prompt", got)
	}
	e.closeBy(t, "s").checkOK(t)
	idle(t, e)
	if s := e.State().Ranks[0]; s.Sessions+s.SessionBlocks != 0 {
		t.Errorf("state %+v", s)
	}
	e.closeBy(t, "s").checkOK(t) // SGLang knows no other answer
	if got := e.results("s"); !slices.Equal(got, []string{"opened", "continued", "continued", "continued", "closed", "unknown"}) {
		t.Errorf("the journal says %v", got)
	}
}

// TestSessionsInChat has chats and completions with a session. SGLang drops it there.
func TestSessionsInChat(t *testing.T) {
	for _, heeds := range []bool{false, true} {
		e := startSGLang(t, Config{AnswerTokens: 4, SessionsInChat: heeds})
		e.mustOpen(t, "s")
		prompts, total := make([]int, 2), make([]int, 2)
		for i, ask := range []struct {
			url  string
			body doc
		}{
			{e.chatURL(), chatOf(doc{"session_params": doc{"id": "s"}}, "My name is Bob.")},
			{e.completionURL(), doc{"prompt": " And mine?", "session_params": doc{"id": "s"}}},
		} {
			v := post(t.Context(), ask.url, ask.body).json(t)
			prompts[i], total[i] = number(at(v, "usage", "prompt_tokens")), number(at(v, "usage", "total_tokens"))
			if want := map[bool]int{true: total[0]}[heeds && i > 0]; cached(v) != want {
				t.Errorf("turn %d has %d cached tokens, want %d", i, cached(v), want)
			}
		}
		if (prompts[1] > total[0]) != heeds {
			t.Errorf("heeds sessions %v: prompts of %v", heeds, prompts)
		}
	}
}

// TestRefusedTurns has turns that SGLang aborts, in each form of an answer. The session
// is what it was.
func TestRefusedTurns(t *testing.T) {
	e := startSGLang(t, Config{SessionsInChat: true, AnswerTokens: 4})
	e.mustOpen(t, "s")
	e.say(t.Context(), "s", 0, 20, nil).checkOK(t)
	for members, want := range map[string]string{
		`{"id":"none"}`:                            "Invalid request: session id none does not exist",
		`[{"id":"none"}]`:                          "Invalid request: session id none does not exist",
		`{"id":"s","replace":true}`:                "Streaming sessions do not support replace.",
		`{"id":"s","offset":1}`:                    "Streaming sessions do not support offset.",
		`{"id":"s","drop_previous_output":true}`:   "Streaming sessions do not support drop_previous_output.",
		`{"id":"s","rid":null,"offset":3,"x":[1]}`: "Streaming sessions do not support offset.",
	} {
		for _, ask := range []struct {
			path, body string
			whole      int
			stream     []any // where an event has the message
			shape      []any // where a whole answer has it
		}{
			{"/generate", `{"text":"x"`, 400, []any{"meta_info", "finish_reason", "message"}, []any{"error", "message"}},
			{"/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}]`, 400, []any{"error", "message"}, []any{"message"}},
			{"/v1/completions", `{"prompt":"x"`, 400, []any{"error", "message"}, []any{"message"}},
		} {
			body := ask.body + `,"session_params":` + members
			r := post(t.Context(), e.URL()+ask.path, body+`}`)
			if r.status != ask.whole || at(r.errorDoc(t), ask.shape...) != want {
				t.Errorf("%s, %s: status %d, %s", ask.path, members, r.status, r.body)
			}
			r = post(t.Context(), e.URL()+ask.path, body+`,"stream":true}`)
			if events, done := r.events(t); r.status != 200 || !done || len(events) != 1 || at(events[0], ask.stream...) != want {
				t.Errorf("%s, %s, streamed: status %d, %s", ask.path, members, r.status, r.body)
			}
			if rec := e.lastRecord(t, ask.path); rec.Outcome != Failed || rec.Session == "" {
				t.Errorf("record %+v", rec)
			}
		}
	}
	long := e.say(t.Context(), "s", 0, 5, doc{"sampling_params": doc{"max_new_tokens": 1 << 20}})
	if long.status != 400 {
		t.Errorf("too long: status %d", long.status)
	}
	if got := counts(e.say(t.Context(), "s", 1000, 5, nil).json(t)); got != [3]int{29, 24, 4} {
		t.Errorf("turn of %v behind refused ones", got)
	}
}

// errorDoc returns the JSON of an answer of any status.
func (r reply) errorDoc(t *testing.T) any {
	t.Helper()
	r.status = http.StatusOK
	return r.json(t)
}

// TestOpenIsRefused has opens that SGLang answers with 400.
func TestOpenIsRefused(t *testing.T) {
	e := startSGLang(t, Config{})
	e.mustOpen(t, "s")
	off := start(t, Config{Flavour: SGLang})
	for name, c := range map[string]struct {
		r    reply
		want string
	}{
		"twice":        {e.openBy(t, "s", 1), "Failed to open the session. Check if a session with the same id is still open."},
		"off":          {off.openBy(t, "s", 1), "Streaming sessions are disabled. Please relaunch with --enable-streaming-session."},
		"no capacity":  {post(t.Context(), e.URL()+OpenPath, doc{"session_id": "t", "streaming": true}), "This engine opens"},
		"no stream":    {post(t.Context(), e.URL()+OpenPath, doc{"session_id": "t", "capacity_of_str_len": 1}), "This engine has"},
		"close of one": {post(t.Context(), e.URL()+ClosePath, doc{}), "This engine closes"},
	} {
		if c.r.status != 400 || !strings.HasPrefix(text0(at(c.r.errorDoc(t), "error", "message")), c.want) {
			t.Errorf("%s: status %d, %s", name, c.r.status, c.r.body)
		}
	}
	if r := start(t, Config{}).openBy(t, "s", 1); r.status != 404 {
		t.Errorf("vLLM: status %d", r.status)
	}
	if got := e.results(OpenPath); !slices.Equal(got, []string{"opened", "exists", "", ""}) {
		t.Errorf("the journal says %v", got)
	}
}

// running starts a long turn and waits until it is computed.
func running(t *testing.T, e *Engine, id string) (leave context.CancelFunc, got chan reply) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	got = make(chan reply, 1)
	before := e.State().Ranks[0].GeneratedTokens
	go func() {
		got <- e.say(ctx, id, 5000, 10, doc{"stream": true, "sampling_params": doc{"max_new_tokens": 2000, "ignore_eos": true}})
	}()
	eventually(t, "the turn runs", func() bool { return e.State().Ranks[0].GeneratedTokens > before+2 })
	return cancel, got
}

// TestOneTurnAtATime has a second turn while one runs, and a client that leaves. The
// session goes on behind the turn before, whose KV is gone.
func TestOneTurnAtATime(t *testing.T) {
	e := startSGLang(t, Config{Speed: 20})
	e.mustOpen(t, "s")
	e.say(t.Context(), "s", 0, 40, nil).checkOK(t)
	leave, got := running(t, e, "s")
	if r := e.say(t.Context(), "s", 1000, 5, nil); r.status != 400 || !strings.Contains(string(r.body), "Streaming session already has an active request.") {
		t.Errorf("status %d, %s", r.status, r.body)
	}
	leave()
	if r := <-got; !errors.Is(r.err, context.Canceled) {
		t.Errorf("status %d, error %v", r.status, r.err)
	}
	idle(t, e)
	if s := e.State().Ranks[0]; s.Sessions != 1 || s.SessionBlocks != 0 {
		t.Errorf("state %+v", s)
	}
	if got := counts(e.say(t.Context(), "s", 1000, 5, nil).json(t)); got != [3]int{53, 32, 8} {
		t.Errorf("turn of %v behind an aborted one", got)
	}
}

// TestCloseIsDeferred closes a session while its turn runs, which goes on.
func TestCloseIsDeferred(t *testing.T) {
	e := startSGLang(t, Config{Speed: 20})
	e.mustOpen(t, "s")
	leave, got := running(t, e, "s")
	e.closeBy(t, "s").checkOK(t)
	if r := e.say(t.Context(), "s", 1000, 5, nil); r.status != 400 || !strings.Contains(string(r.body), "close was requested for session s") {
		t.Errorf("status %d, %s", r.status, r.body)
	}
	if r := e.openBy(t, "s", 1); r.status != 400 {
		t.Errorf("opened while it closes: status %d", r.status)
	}
	leave()
	<-got
	idle(t, e)
	eventually(t, "the session is closed", func() bool { return e.State().Ranks[0].Sessions == 0 })
	if got := e.results("s"); !slices.Equal(got, []string{"opened", "continued", "deferred", "closing", "exists"}) {
		t.Errorf("the journal says %v", got)
	}
}

// TestIdleSessionsExpire has one that is idle for too long, and one that is not.
func TestIdleSessionsExpire(t *testing.T) {
	e := startSGLang(t, Config{})
	e.openBy(t, "s", 0.1).checkOK(t)
	e.openBy(t, "t", 600).checkOK(t)
	e.say(t.Context(), "s", 0, 40, nil).checkOK(t)
	eventually(t, "the session expires", func() bool { return e.State().Ranks[0].Sessions == 1 })
	if s := e.State().Ranks[0]; s.Expired != 1 || s.UsedBlocks != 0 {
		t.Errorf("state %+v", s)
	}
	if r := e.say(t.Context(), "s", 0, 5, nil); r.status != 400 {
		t.Errorf("status %d", r.status)
	}
	e.say(t.Context(), "t", 0, 5, nil).checkOK(t)
}

// TestSessionsFillTheCache has a session whose blocks a request needs. The request waits
// until the session is closed.
func TestSessionsFillTheCache(t *testing.T) {
	e := startSGLang(t, Config{Blocks: 10, BlockSize: 16, AnswerTokens: 4})
	e.mustOpen(t, "s")
	e.say(t.Context(), "s", 0, 100, nil).checkOK(t)
	got := make(chan reply, 1)
	go func() {
		got <- post(t.Context(), e.completionURL(), doc{"prompt": tokens(10_000, 100), "max_tokens": 4})
	}()
	eventually(t, "the request waits", func() bool { return e.State().Ranks[0].Waiting == 1 })
	select {
	case r := <-got:
		t.Fatalf("answered beside a full cache: status %d, %s", r.status, r.body)
	case <-time.After(50 * time.Millisecond):
	}
	e.closeBy(t, "s").checkOK(t)
	select {
	case r := <-got:
		r.checkOK(t)
	case <-time.After(5 * time.Second):
		t.Fatal("the request still waits")
	}
	idle(t, e)
}

// TestSessionsByRank has a session on two ranks: each keeps what its own turns computed.
func TestSessionsByRank(t *testing.T) {
	e := startSGLang(t, Config{Ranks: 2})
	e.mustOpen(t, "s")
	for _, c := range []struct {
		rank int
		want [3]int
	}{{1, [3]int{20, 0, 8}}, {1, [3]int{48, 28, 8}}, {0, [3]int{20, 0, 8}}, {1, [3]int{76, 56, 8}}} {
		if got := counts(e.say(t.Context(), "s", 0, 20, doc{"routed_dp_rank": c.rank}).json(t)); got != c.want {
			t.Errorf("rank %d: %v, want %v", c.rank, got, c.want)
		}
	}
	e.closeBy(t, "s").checkOK(t)
	idle(t, e)
	if got := e.results(ClosePath); !slices.Equal(got, []string{"closed"}) {
		t.Errorf("the journal says %v", got)
	}
}

// TestRestartForgetsSessions restarts an engine.
func TestRestartForgetsSessions(t *testing.T) {
	e := startSGLang(t, Config{})
	e.mustOpen(t, "s")
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	if r := e.say(t.Context(), "s", 0, 5, nil); r.status != 400 || !strings.Contains(string(r.body), "does not exist") {
		t.Errorf("status %d, %s", r.status, r.body)
	}
	e.mustOpen(t, "s")
	if lives := []int{e.Journal()[0].Life, e.lastRecord(t, OpenPath).Life}; !slices.Equal(lives, []int{1, 2}) {
		t.Errorf("opened in lives %v", lives)
	}
}

// TestSessionFaults has opens and closes fail, before the engine did it and after. Other
// requests go on, or meet a fault of their own.
func TestSessionFaults(t *testing.T) {
	e := startSGLang(t, Config{AnswerTokens: 4})
	set := func(f Fault) {
		t.Helper()
		if err := e.SetFault(f); err != nil {
			t.Fatal(err)
		}
	}
	set(Fault{Kind: Status, Status: 500, Path: OpenPath, Count: 1})
	set(Fault{Kind: Status, Status: 503, Path: ClosePath, Count: 2})
	set(Fault{Kind: CloseConn, Count: 1})
	if s := e.State(); s.Fault.Kind != CloseConn || s.PathFaults[ClosePath].Count != 2 {
		t.Errorf("state %+v", s)
	}
	if r := e.openBy(t, "s", 1); r.status != 500 {
		t.Errorf("status %d", r.status)
	}
	e.mustOpen(t, "s")
	if r := e.say(t.Context(), "s", 0, 5, nil); r.err == nil {
		t.Errorf("status %d", r.status)
	}
	e.say(t.Context(), "s", 0, 5, nil).checkOK(t)
	for _, want := range []int{503, 503, 200, 200} {
		if r := e.closeBy(t, "s"); r.status != want {
			t.Errorf("status %d, want %d", r.status, want)
		}
	}
	if got := e.results("s"); !slices.Equal(got, []string{"", "opened", "continued", "", "", "closed", "unknown"}) {
		t.Errorf("the journal says %v", got)
	}

	set(Fault{Kind: NoSessions})
	if r := e.openBy(t, "s", 1); r.status != 400 || !strings.Contains(string(r.body), "Streaming sessions are disabled.") {
		t.Errorf("status %d, %s", r.status, r.body)
	}
	set(Fault{Kind: Hang, Path: OpenPath, Late: true, Count: 1})
	set(Fault{Kind: Hang, Path: ClosePath, Count: 1})
	for _, path := range []string{OpenPath, ClosePath} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		if r := post(ctx, e.URL()+path, doc{"capacity_of_str_len": 1, "session_id": "t", "streaming": true}); !errors.Is(r.err, context.DeadlineExceeded) {
			t.Errorf("%s: status %d, error %v", path, r.status, r.err)
		}
		cancel()
		e.lastRecord(t, path)
	}
	if got := e.results("t"); !slices.Equal(got, []string{"opened", ""}) || e.State().Ranks[0].Sessions != 1 {
		t.Errorf("the journal says %v", got)
	}
	set(Fault{Kind: Reset, Path: ClosePath, Late: true})
	if r := e.closeBy(t, "t"); r.err == nil || e.State().Ranks[0].Sessions != 0 {
		t.Errorf("status %d", r.status)
	}
	set(Fault{Path: ClosePath})
	e.closeBy(t, "t").checkOK(t)
	for _, f := range []Fault{
		{Kind: Refuse, Path: OpenPath}, {Kind: NoSessions, Path: ClosePath}, {Kind: Hang, Late: true}, {Kind: Hang, Path: "/health", Late: true},
	} {
		if e.SetFault(f) == nil {
			t.Errorf("%+v was accepted", f)
		}
	}
}

// TestGenerate has /generate without a session. Only an SGLang has it.
func TestGenerate(t *testing.T) {
	e := start(t, Config{Flavour: SGLang, AnswerTokens: 6})
	v := post(t.Context(), e.URL()+"/generate", doc{"text": strings.Repeat("why? ", 40), "rid": "mine"}).json(t)
	said := text0(at(v, "text"))
	if said == "" || at(v, "meta_info", "id") != "mine" || counts(v) != [3]int{50, 0, 6} {
		t.Errorf("answered %v", v)
	}
	r := post(t.Context(), e.URL()+"/generate", doc{"text": strings.Repeat("why? ", 40), "stream": true, "sampling_params": doc{"max_new_tokens": 3, "ignore_eos": true}})
	events, done := r.events(t)
	if last := events[len(events)-1]; !done || len(events) != 3 || counts(last) != [3]int{50, 48, 3} || !strings.HasPrefix(said, text0(at(last, "text"))[:9]) ||
		at(last, "meta_info", "finish_reason", "type") != "length" {
		t.Errorf("streamed %v", events)
	}
	if r := post(t.Context(), start(t, Config{}).URL()+"/generate", doc{"text": "x"}); r.status != 404 {
		t.Errorf("vLLM: status %d", r.status)
	}
}
