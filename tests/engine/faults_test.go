package engine

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// streamed is a chat whose answer is long enough to be interrupted.
func streamed(answer int) doc {
	return chatOf(doc{"stream": true, "max_tokens": answer, "ignore_eos": true}, "Tell me a long story.")
}

// TestFaults has each fault as a client sees it. After it the engine works.
func TestFaults(t *testing.T) {
	e := start(t, Config{AnswerTokens: 8})
	truncated := func(t *testing.T, r reply) {
		if r.status != http.StatusOK || !errors.Is(r.err, io.ErrUnexpectedEOF) || strings.Contains(string(r.body), "[DONE]") {
			t.Errorf("status %d, error %v, body %q", r.status, r.err, r.body)
		}
	}
	for _, tc := range []struct {
		name    string
		fault   Fault
		stream  bool
		outcome Outcome
		check   func(*testing.T, reply)
	}{
		{"429", Fault{Kind: Status, Status: 429, RetryAfter: 3}, false, Refused, func(t *testing.T, r reply) {
			if r.status != 429 || r.header.Get("Retry-After") != "3" || !strings.Contains(string(r.body), `"code":429`) {
				t.Errorf("status %d, header %v, body %s", r.status, r.header, r.body)
			}
		}},
		{"503", Fault{Kind: Status}, true, Refused, func(t *testing.T, r reply) {
			if r.status != 503 || r.header.Get("Retry-After") != "" || r.header.Get(EngineHeader) == "" {
				t.Errorf("status %d, header %v", r.status, r.header)
			}
		}},
		{"close", Fault{Kind: CloseConn}, false, Broken, func(t *testing.T, r reply) {
			if r.status != 0 || !errors.Is(r.err, io.EOF) {
				t.Errorf("status %d, error %v", r.status, r.err)
			}
		}},
		{"reset", Fault{Kind: Reset}, false, Broken, func(t *testing.T, r reply) {
			if r.status != 0 || !errors.Is(r.err, syscall.ECONNRESET) {
				t.Errorf("status %d, error %v", r.status, r.err)
			}
		}},
		{"die after three chunks", Fault{Kind: Die, Chunks: 3}, true, Broken, func(t *testing.T, r reply) {
			truncated(t, r)
			if events, _ := r.events(t); len(events) != 1+3 {
				t.Errorf("%d events", len(events))
			}
		}},
		{"die at once", Fault{Kind: Die}, true, Broken, func(t *testing.T, r reply) {
			truncated(t, r)
			if len(r.body) != 0 {
				t.Errorf("body %q", r.body)
			}
		}},
		{"die late", Fault{Kind: Die, Chunks: 1000}, true, Broken, func(t *testing.T, r reply) {
			truncated(t, r)
			if events, _ := r.events(t); len(events) != 1+7 {
				t.Errorf("%d events", len(events))
			}
		}},
		{"die without a stream", Fault{Kind: Die}, false, Broken, truncated},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.fault.Count = 1
			if err := e.SetFault(tc.fault); err != nil {
				t.Fatal(err)
			}
			body := chatOf(doc{"stream": tc.stream}, "Hello")
			if tc.stream {
				body = streamed(8)
			}
			get(t.Context(), e.URL()+"/health").checkOK(t) // is not inference, and does not count
			tc.check(t, post(t.Context(), e.chatURL(), body))
			if rec := e.lastRecord(t, "/v1/chat/completions"); rec.Outcome != tc.outcome || rec.Fault != tc.fault.Kind {
				t.Errorf("record %+v", rec)
			}
			post(t.Context(), e.chatURL(), body).checkOK(t)
			idle(t, e)
		})
	}
}

func (r reply) checkOK(t *testing.T) {
	t.Helper()
	if r.err != nil || r.status != http.StatusOK {
		t.Errorf("status %d, error %v, body %s", r.status, r.err, r.body)
	}
}

// idle waits until no request runs and no block is held.
func idle(t *testing.T, e *Engine) {
	t.Helper()
	eventually(t, "the engine is idle", func() bool {
		for _, r := range e.State().Ranks {
			if r.Running+r.Waiting+r.UsedBlocks > 0 {
				return false
			}
		}
		return true
	})
}

// TestHangs has a client that waits in vain, with and without a header.
func TestHangs(t *testing.T) {
	e := start(t, Config{})
	for kind, status := range map[FaultKind]int{Hang: 0, HangAfterHeader: http.StatusOK} {
		patience := 100 * time.Millisecond
		if status > 0 {
			patience = time.Second // the header must have come by then
		}
		if err := e.SetFault(Fault{Kind: kind, Everything: true, Count: 2}); err != nil {
			t.Fatal(err)
		}
		for _, ask := range []func(context.Context) reply{
			func(ctx context.Context) reply { return get(ctx, e.URL()+"/health") },
			func(ctx context.Context) reply { return post(ctx, e.chatURL(), streamed(4)) },
		} {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			if r := ask(ctx); r.status != status || !errors.Is(r.err, context.DeadlineExceeded) {
				t.Errorf("%s: status %d, error %v", kind, r.status, r.err)
			}
			cancel()
		}
		if rec := e.lastRecord(t, "/v1/chat/completions"); rec.Outcome != Broken || rec.Status != status {
			t.Errorf("record %+v", rec)
		}
		post(t.Context(), e.chatURL(), streamed(4)).checkOK(t)
	}
}

// TestRefuse closes the listener while a request runs, which goes on.
func TestRefuse(t *testing.T) {
	e := start(t, Config{Speed: 10})
	got := make(chan reply, 1)
	go func() { got <- post(t.Context(), e.chatURL(), streamed(1000)) }()
	eventually(t, "the request runs", func() bool { return e.State().Ranks[0].Running == 1 })
	for range 2 { // again changes nothing
		if err := e.SetFault(Fault{Kind: Refuse}); err != nil {
			t.Fatal(err)
		}
	}
	if r := get(t.Context(), e.URL()+"/health"); !errors.Is(r.err, syscall.ECONNREFUSED) {
		t.Errorf("status %d, error %v", r.status, r.err)
	}
	if r := <-got; r.err != nil || !strings.HasSuffix(string(r.body), "data: [DONE]\n\n") {
		t.Errorf("the request that ran: status %d, error %v", r.status, r.err)
	}
	if err := e.SetFault(Fault{}); err != nil {
		t.Fatal(err)
	}
	get(t.Context(), e.URL()+"/health").checkOK(t)
}

// TestSlow has one request whose steps take twenty times as long.
func TestSlow(t *testing.T) {
	e := start(t, Config{AnswerTokens: 3})
	took := func() float64 {
		post(t.Context(), e.chatURL(), chatOf(nil, "Hello")).checkOK(t)
		r := e.lastRecord(t, "/v1/chat/completions")
		return r.EndMS - r.AdmittedMS
	}
	before := took()
	if err := e.SetFault(Fault{Kind: Slow, Factor: 20, Count: 1}); err != nil {
		t.Fatal(err)
	}
	if slow := took(); slow < 19*before || slow > 21*before {
		t.Errorf("%v ms before, %v ms with the fault", before, slow)
	}
	if after := took(); after > 2*before {
		t.Errorf("%v ms before, %v ms after the fault", before, after)
	}
}

// TestBadFaults has faults that make no sense.
func TestBadFaults(t *testing.T) {
	e := start(t, Config{})
	for _, f := range []Fault{{Kind: "x"}, {Kind: Status, Status: 200}, {Kind: Slow, Factor: 0.5}, {Kind: Hang, Count: -1}} {
		if e.SetFault(f) == nil {
			t.Errorf("%+v was accepted", f)
		}
	}
}

// TestKillAndRestart kills an engine in the middle of streams: they break, nobody
// can connect, and the engine comes back at its address without its cache.
func TestKillAndRestart(t *testing.T) {
	e := start(t, Config{Speed: 10})
	warm := chatOf(doc{"max_tokens": 2}, strings.Repeat("A long prompt. ", 100))
	post(t.Context(), e.chatURL(), warm).checkOK(t)
	if v := post(t.Context(), e.chatURL(), warm).json(t); cached(v) == 0 {
		t.Error("the cache is not warm")
	}
	got := make(chan reply, 2)
	go func() { got <- post(t.Context(), e.chatURL(), streamed(5000)) }()
	go func() {
		got <- post(t.Context(), e.chatURL(), chatOf(doc{"max_tokens": 5000, "ignore_eos": true}, "No stream"))
	}()
	eventually(t, "the requests run", func() bool { return e.State().Ranks[0].Running == 2 })
	life := e.State().Life

	e.Kill()
	e.Kill() // changes nothing
	for range 2 {
		if r := <-got; r.err == nil || strings.Contains(string(r.body), "[DONE]") {
			t.Errorf("status %d, body %q", r.status, r.body)
		}
	}
	if r := get(t.Context(), e.URL()+"/health"); !errors.Is(r.err, syscall.ECONNREFUSED) {
		t.Errorf("status %d, error %v", r.status, r.err)
	}
	if s := e.State(); s.Up || len(s.Ranks) != 0 {
		t.Errorf("state %+v", s)
	}
	for _, r := range e.Journal()[2:] {
		if r.Outcome != Broken && r.Path == "/v1/chat/completions" {
			t.Errorf("record %+v", r)
		}
	}
	for range 2 { // from dead, and from alive
		if err := e.Restart(); err != nil {
			t.Fatal(err)
		}
		if v := post(t.Context(), e.chatURL(), warm).json(t); cached(v) != 0 {
			t.Errorf("%d tokens are cached after the restart", cached(v))
		}
	}
	if s := e.State(); !s.Up || s.Life != life+2 {
		t.Errorf("state %+v", s)
	}
}

// TestKillClosesIdleConnections has a connection that is kept alive.
func TestKillClosesIdleConnections(t *testing.T) {
	e := start(t, Config{KeepAlive: time.Minute})
	conn, err := net.Dial("tcp", e.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	io.WriteString(conn, "GET /health HTTP/1.1\r\nHost: engine\r\n\r\n")
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(err)
	}
	e.Kill()
	if _, err := r.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("reading on: %v", err)
	}
}

// TestAbortOnDisconnect has clients that leave: while they are decoded, streamed
// and not, and while they wait. Nothing is held soon after, what was computed
// stays cached, and request_success_total does not count them.
func TestAbortOnDisconnect(t *testing.T) {
	e := start(t, Config{BlockSize: 32, Blocks: 2000, MaxRunning: 2, Speed: 10})
	ctx, leave := context.WithCancel(t.Context())
	waiting, leaveQueue := context.WithCancel(ctx)
	done := make(chan reply, 3)
	for i, stream := range []bool{true, false, true} {
		body := doc{"prompt": tokens(1_000_000*i, 3000), "max_tokens": 20000, "ignore_eos": true, "stream": stream}
		ctx := ctx
		if i == 2 {
			eventually(t, "two run", func() bool { return e.State().Ranks[0].Running == 2 })
			ctx = waiting
		}
		go func() { done <- post(ctx, e.completionURL(), body) }()
	}
	eventually(t, "two run and one waits", func() bool {
		s := e.State().Ranks[0]
		return s.Running == 2 && s.Waiting == 1 && s.GeneratedTokens > 4
	})
	if v := get(t.Context(), e.URL()+"/load").json(t); number(at(v, "server_load")) != 3 {
		t.Errorf("load %v", v)
	}
	leaveQueue() // first, or it would run when the others are gone
	eventually(t, "none waits", func() bool { return e.State().Ranks[0].Waiting == 0 })
	leave()
	for range 3 {
		if r := <-done; !errors.Is(r.err, context.Canceled) {
			t.Errorf("status %d, error %v", r.status, r.err)
		}
	}
	idle(t, e)
	if s := e.State().Ranks[0]; s.Aborted != 3 || s.Finished != 0 || s.CachedBlocks == 0 {
		t.Errorf("state %+v", s)
	}
	for i, want := range []int{2976, 2976, 0} {
		v := post(t.Context(), e.completionURL(), doc{"prompt": tokens(1_000_000*i, 3000), "max_tokens": 1}).json(t)
		if cached(v) != want {
			t.Errorf("prompt %d hit %d, want %d", i, cached(v), want)
		}
	}
	aborted := 0
	for _, r := range e.Journal() {
		if r.Outcome == Aborted {
			aborted++
		}
	}
	if aborted != 3 {
		t.Errorf("%d aborted in the journal", aborted)
	}
}
