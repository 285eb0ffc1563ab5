package tests

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

const oneRole = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"

// stall sends the parts of a stream and then pauses until the client leaves or go is
// closed. Then it sends the end of the stream.
func stall(goOn <-chan struct{}, parts ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		ctl := http.NewResponseController(w)
		ctl.Flush()
		for _, p := range parts {
			io.WriteString(w, p)
			ctl.Flush()
		}
		select {
		case <-r.Context().Done():
		case <-goOn:
			io.WriteString(w, oneChunk+"data: [DONE]\n\n")
		}
	}
}

// goroutines ends the engines and their connections. It fails the test if many more
// goroutines are left than before the first request.
func goroutines(t *testing.T, s *server, engines []*canned.Engine, before int) {
	t.Helper()
	for _, e := range engines {
		e.Kill()
	}
	n := 0
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		s.client.CloseIdleConnections()
		if n = runtime.NumGoroutine(); n <= before+20 {
			return
		}
	}
	t.Errorf("%d goroutines, %d before", n, before)
}

// together has 32 clients request a stream each at the same time.
func (s *server) together(t *testing.T, header ...string) []answer {
	t.Helper()
	answers := make([]answer, 32)
	var clients sync.WaitGroup
	for i := range answers {
		clients.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			answers[i] = s.chat(ctx, ask(fmt.Sprintf("client %d: %s", i, strings.Repeat("why? ", 40))).streamed(), header...)
		})
	}
	clients.Wait()
	return answers
}

// TestFirstTokenIsAwaited has one of four engines produce no first token, in each possible
// way. The others serve all requests.
func TestFirstTokenIsAwaited(t *testing.T) {
	for _, v := range []struct {
		name string
		set  func(e *canned.Engine)
	}{
		{"NoHeader", func(e *canned.Engine) { e.SetFault(canned.Fault{Kind: canned.HangBeforeHeader}) }},
		{"HeaderAlone", func(e *canned.Engine) { e.SetHandler(stall(nil)) }},
		{"RoleAlone", func(e *canned.Engine) { e.SetHandler(stall(nil, oneRole)) }},
		{"CommentsAlone", func(e *canned.Engine) { e.SetHandler(stall(nil, ": ping\n\n", ": ping\n\n")) }},
		{"BreaksBefore", func(e *canned.Engine) { e.SetHandler(cut(nil, oneRole)) }},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, 4, canned.Pace{Words: 5})
			pool := `pool="first-` + v.name + `"`
			s := startCaddy(t, route(engines, "pool first-"+v.name, "policy round_robin", "timeouts {\nfirst_token 500ms\n}"))
			level := runtime.NumGoroutine()
			before := s.scrape(t)
			v.set(engines[0])
			start := time.Now()
			for _, a := range s.together(t) {
				if !a.ok() || a.engine() == "e1" || !strings.HasSuffix(string(a.body), "data: [DONE]\n\n") {
					t.Errorf("status %d, error %v, by %s, body %q", a.status, a.err, a.engine(), a.body)
				}
			}
			t.Logf("served within %v", time.Since(start).Round(10*time.Millisecond))
			s.booksAtZero(t)
			reason := `reason="first_token"`
			if v.name == "BreaksBefore" {
				reason = `reason="broken"`
			}
			m := s.scrape(t)
			if n := m.value(retriesTotal, pool, reason) - before.value(retriesTotal, pool, reason); n < 1 || n > 32 {
				t.Errorf("%v retries for that reason", n)
			}
			if n := s.logged(t, markedDown); n != 1 {
				t.Errorf("%d workers were marked down, want 1", n)
			}
			eventually(t, 3*time.Second, "the engine has no requests any more", func() bool { return engines[0].Active() == 0 })
			goroutines(t, s, engines, level)
		})
	}
}

// TestStreamsWithoutATokenSurvive has one of four engines that sends a header, as engines do
// at once, and breaks before the first token. The others serve its requests, by default.
func TestStreamsWithoutATokenSurvive(t *testing.T) {
	for name, handler := range map[string]http.HandlerFunc{"HeaderAlone": cut(nil, ": ping\n\n"), "RoleAlone": cut(nil, oneRole)} {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, 4, canned.Pace{Words: 5})
			s := startCaddy(t, route(engines, "pool survive-"+name, "policy round_robin"))
			before := s.scrape(t)
			engines[0].SetHandler(handler)
			for _, a := range s.together(t) {
				if !a.ok() || a.engine() == "e1" || !strings.HasSuffix(string(a.body), "data: [DONE]\n\n") {
					t.Errorf("status %d, error %v, by %s, body %q", a.status, a.err, a.engine(), a.body)
				}
			}
			s.booksAtZero(t)
			pool, reason := `pool="survive-`+name+`"`, `reason="broken"`
			if n := s.scrape(t).value(retriesTotal, pool, reason) - before.value(retriesTotal, pool, reason); n < 1 {
				t.Errorf("%v retries", n)
			}
		})
	}
}

// TestFirstTokenOfNobody has engines that produce no first token. The client gets a 504 in
// the shape of the API. The router tries each engine once.
func TestFirstTokenOfNobody(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "pool first-nobody", "timeouts {\nfirst_token 200ms\n}"))
	for _, e := range engines {
		e.SetHandler(stall(nil, oneRole))
	}
	before := s.scrape(t)
	a := s.chat(t.Context(), ask("anybody?").streamed())
	if a.status != http.StatusGatewayTimeout || !strings.Contains(string(a.body), `"code":"worker_timeout"`) {
		t.Errorf("status %d, error %v, body %q; want 504 and worker_timeout", a.status, a.err, a.body)
	}
	if n := engines[0].Requests() + engines[1].Requests(); n != 2 {
		t.Errorf("%d attempts, want 2", n)
	}
	a = s.post(t.Context(), "/v1/messages", []byte(`{"model":"canned","max_tokens":9,"stream":true,"messages":[{"role":"user","content":"hi"}]}`))
	if a.status != http.StatusGatewayTimeout || !strings.Contains(string(a.body), `"type":"error"`) || !strings.Contains(string(a.body), `"code":"worker_timeout"`) {
		t.Errorf("status %d, error %v, body %q; want Anthropic's shape of it", a.status, a.err, a.body)
	}
	s.booksAtZero(t)
	s.wantFigures(t, before, []figure{{requestsTotal, []string{`pool="first-nobody"`, `outcome="unavailable"`}, 2}})
}

// TestHeldAnswersPassUnchanged compares answers with and without a deadline. They are
// streams and plain answers, well-formed and malformed.
func TestHeldAnswersPassUnchanged(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, "handle /held/* {\nuri strip_prefix /held\n"+route(engines, "pool held", "timeouts {\nfirst_token 30s\nstream_idle 30s\n}")+
		"\n}\nhandle /v1/* {\n"+route(engines, "pool loose")+"\n}")
	long := strings.Repeat(": "+strings.Repeat("x", 1000)+"\n\n", 200)
	for name, v := range map[string]struct{ kind, body string }{
		"stream":        {"text/event-stream", oneRole + oneChunk + oneChunk + "data: [DONE]\n\n"},
		"no token":      {"text/event-stream", oneRole + "data: [DONE]\n\n"},
		"error event":   {"text/event-stream", "data: {\"error\":{\"message\":\"x\"}}\n\n"},
		"empty":         {"text/event-stream", ""},
		"long preface":  {"text/event-stream", long + oneChunk + "data: [DONE]\n\n"},
		"not a stream":  {"application/json", wholeJSON},
		"garbage":       {"text/event-stream", htmlPage},
		"one byte more": {"text/event-stream", oneChunk + "x"},
	} {
		for _, e := range engines {
			e.SetHandler(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", v.kind)
				if r.Header.Get("X-Status") != "" {
					w.WriteHeader(http.StatusBadRequest)
				}
				io.WriteString(w, v.body)
			})
		}
		for _, status := range []string{"", "400"} {
			var got [2]answer
			for i, path := range []string{"/held/v1/chat/completions", "/v1/chat/completions"} {
				header := []string{}
				if status != "" {
					header = []string{"X-Status", status}
				}
				got[i] = s.post(t.Context(), path, ask("hi").streamed().body(), header...)
			}
			if string(got[0].body) != v.body || got[0].status != got[1].status || string(got[1].body) != v.body || got[0].err != nil ||
				got[0].header.Get("Content-Type") != v.kind {
				t.Errorf("%s, status %q: %d and %d, error %v, type %q, body %.200q", name, status, got[0].status, got[1].status, got[0].err, got[0].header.Get("Content-Type"), got[0].body)
			}
		}
	}
	s.booksAtZero(t)
}

// TestClientLeavesBeforeAHeldAnswer has clients that disconnect before the first token. No
// worker is marked down for it.
func TestClientLeavesBeforeAHeldAnswer(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "pool held-leave", "timeouts {\nfirst_token 30s\n}"))
	for _, e := range engines {
		e.SetHandler(stall(nil, oneRole))
	}
	before := s.scrape(t)
	var clients sync.WaitGroup
	ctx, leave := context.WithCancel(t.Context())
	for range 32 {
		clients.Go(func() { s.chat(ctx, ask("hi").streamed()) })
	}
	eventually(t, 10*time.Second, "all are at the engines", func() bool { return engines[0].Active()+engines[1].Active() == 32 })
	leave()
	clients.Wait()
	eventually(t, 3*time.Second, "the engines notice", func() bool { return engines[0].Active()+engines[1].Active() == 0 })
	s.booksAtZero(t)
	s.wantFigures(t, before, []figure{
		{requestsTotal, []string{`pool="held-leave"`, `outcome="client_gone"`}, 32},
		{retriesTotal, []string{`pool="held-leave"`}, 0},
	})
	if n := s.logged(t, markedDown); n != 0 {
		t.Errorf("%d workers were marked down", n)
	}
}

// TestStreamThatStallsIsEnded has one of four engines stop in the middle of its answers.
func TestStreamThatStallsIsEnded(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{Words: 5})
	s := startCaddy(t, route(engines, "pool stalled", "policy round_robin", "timeouts {\nstream_idle 400ms\n}"))
	level := runtime.NumGoroutine()
	before := s.scrape(t)
	engines[0].SetHandler(stall(nil, oneRole, oneChunk))
	served, broken := 0, 0
	for _, a := range s.together(t) {
		switch {
		case a.ok():
			served++
		case a.engine() == "e1" && a.status == http.StatusOK && a.err != nil && strings.HasPrefix(string(a.body), oneRole+oneChunk) &&
			strings.Count(string(a.body), brokenEvent) == 1 && !strings.Contains(string(a.body), "[DONE]"):
			broken++
		default:
			t.Errorf("status %d, error %v, by %s, body %q", a.status, a.err, a.engine(), a.body)
		}
	}
	if broken == 0 || served+broken != 32 {
		t.Errorf("%d served and %d broken of 32", served, broken)
	}
	s.booksAtZero(t)
	s.wantFigures(t, before, []figure{
		{requestsTotal, []string{`pool="stalled"`, `outcome="broken"`}, float64(broken)},
		{requestsTotal, []string{`pool="stalled"`, `outcome="ok"`}, float64(served)},
	})
	if n := s.logged(t, "stream broke: the stream stalled"); n != 1 {
		t.Errorf("%d log lines say that a stream stalled, want 1", n)
	}
	eventually(t, 3*time.Second, "the engine has no requests any more", func() bool { return engines[0].Active() == 0 })
	goroutines(t, s, engines, level)
}

// TestPrefillIsNoPause has a first byte that takes longer than stream_idle.
func TestPrefillIsNoPause(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{FirstToken: 600 * time.Millisecond, Words: 5})
	s := startCaddy(t, route(engines, "timeouts {\nstream_idle 150ms\n}"))
	s.mustChat(t, ask("long prompt").streamed())
	s.booksAtZero(t)
}

// TestSlowClientIsNoStalledStream has clients that read slowly. All buffers between them
// and the engine are full for longer than stream_idle.
func TestSlowClientIsNoStalledStream(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "pool slow", "timeouts {\nfirst_token 10s\nstream_idle 1500ms\n}"))
	chunk := strings.Replace(oneChunk, `"a"`, `"`+strings.Repeat("a", 60<<10)+`"`, 1)
	var blocked atomic.Int64
	for _, e := range engines {
		e.SetHandler(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range 400 { // 24 MB
				start := time.Now()
				if _, err := io.WriteString(w, chunk); err != nil {
					return
				}
				if time.Since(start) > 2*time.Second {
					blocked.Add(1)
				}
			}
			io.WriteString(w, "data: [DONE]\n\n")
		})
	}
	smallReadBuffers(s.client)
	var clients sync.WaitGroup
	for range 2 { // to read so much is work, and takes the engines' time
		clients.Go(func() {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"/v1/chat/completions", strings.NewReader(string(ask("slow").streamed().body())))
			if err != nil {
				t.Error(err)
				return
			}
			resp, err := s.client.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if _, err := io.CopyN(io.Discard, resp.Body, 1<<20); err != nil {
				t.Error(err)
				return
			}
			time.Sleep(3 * time.Second) // it is the pause that is tested
			rest, err := io.ReadAll(resp.Body)
			if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
				t.Errorf("error %v, the end is %q", err, rest[max(0, len(rest)-200):])
			}
		})
	}
	clients.Wait()
	if blocked.Load() == 0 {
		t.Error("no engine was kept waiting")
	}
	s.booksAtZero(t)
	if n := s.logged(t, markedDown); n != 0 {
		t.Errorf("%d workers were marked down", n)
	}
}
