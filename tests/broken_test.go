package tests

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// drip is a slow upload.
type drip struct {
	left int
	ctx  context.Context
}

// Read implements io.Reader.
func (d *drip) Read(p []byte) (int, error) {
	if d.left <= 0 {
		return 0, io.EOF
	}
	select {
	case <-d.ctx.Done():
		return 0, d.ctx.Err()
	case <-time.After(time.Millisecond):
	}
	n := min(len(p), 4096, d.left)
	d.left -= n
	return n, nil
}

// listen returns a listener of the test's own.
func listen(t testing.TB) net.Listener {
	t.Helper()
	ln, err := canned.Listen()
	noError(t, err)
	return ln
}

// serveRaw starts an engine that does not read its requests before it calls h.
func serveRaw(t *testing.T, h http.HandlerFunc) (addr string) {
	t.Helper()
	ln := listen(t)
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	go srv.Serve(ln)
	t.Cleanup(func() { srv.Close() })
	return ln.Addr().String()
}

// TestAnswerBeforeTheUploadEnds streams uploads to engines that refuse them before they
// have read them. The router cannot resend what it read, so the refusal is the answer. The
// race detector checks what the two directions share.
func TestAnswerBeforeTheUploadEnds(t *testing.T) {
	var asked atomic.Int64
	early := func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost { // and not to see which models there are
			asked.Add(1)
		}
		http.NewResponseController(w).EnableFullDuplex()
		io.CopyN(io.Discard, r.Body, 4096)
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(refusal.Body)))
		w.WriteHeader(http.StatusServiceUnavailable)
		io.WriteString(w, refusal.Body)
		http.NewResponseController(w).Flush()
		io.Copy(io.Discard, r.Body)
	}
	s := startCaddy(t, "kv_router "+serveRaw(t, early)+" "+serveRaw(t, early))
	for _, v := range [][2]string{{"/v1/audio/transcriptions", ""}, {"/v1/images/edits", "gzip"}} {
		whole := 0
		for range 4 {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			a := s.request(ctx, http.MethodPost, v[0], &drip{1 << 17, ctx}, "Content-Encoding", v[1])
			cancel()
			switch {
			case a.status == http.StatusServiceUnavailable && string(a.body) == refusal.Body:
				whole++
			case a.status != 0: // the server may close before the client has seen the answer
				t.Errorf("%q: status %d, error %v, body %q; want the engine's 503", v, a.status, a.err, a.body)
			}
		}
		if whole == 0 {
			t.Errorf("%q: no client got the engine's answer", v)
		}
		equal(t, asked.Swap(0), 4, "%q: requests at the engines, if nothing left of an upload was sent to another", v)
	}
	s.booksAtZero(t)
}

// TestBrokenUploadIsNoEnginesFault has a client that breaks its uploads. Another client's
// session must not move because of it.
func TestBrokenUploadIsNoEnginesFault(t *testing.T) {
	for _, v := range []struct{ name, head, body string }{
		{"BadChunk", "POST /v1/audio/transcriptions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", "3\r\nabc\r\nZZZ\r\n"},
		{"BadChunkCompressed", "POST /v1/chat/completions HTTP/1.1\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", "3\r\nabc\r\nZZZ\r\n"},
		{"BadChunkOversized", "POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", "C8\r\n" + strings.Repeat("x", 200) + "\r\nZZZ\r\n"},
		{"CutShort", "POST /v1/audio/transcriptions HTTP/1.1\r\nContent-Length: 1000\r\n", "abc"},
		{"CutShortInference", "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 50\r\n", "{"},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, "pool "+v.name, "max_body 100", affinity("hard")))
			hello := ask("hello")
			hello.Model = "m" // within max_body
			home := s.mustChat(t, hello, "X-Session-Id", "victim").engine()
			before := s.scrape(t)
			for i := range 10 {
				s.spoil(t, v.head, v.body)
				eventually(t, "the broken request is over", func() bool {
					m := s.scrape(t)
					return m.value(requestsTotal, `pool="`+v.name+`"`)-before.value(requestsTotal, `pool="`+v.name+`"`) == float64(2*i+1)
				})
				if e := s.mustChat(t, hello, "X-Session-Id", "victim").engine(); e != home {
					t.Errorf("the session moved from %s to %s after %d broken uploads", home, e, i+1)
					home = e
				}
			}
			equal(t, s.logged(t, markedDown), 0, "workers marked down for it")
			s.booksAtZero(t)
		})
	}
}

// spoil sends exactly these bytes of a request by hand.
func (s *server) spoil(t *testing.T, head, body string) {
	t.Helper()
	conn := s.connect(t)
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(conn, "%sHost: %s\r\n\r\n%s", head, s.addr, body)
	if strings.Contains(head, "Content-Length") {
		conn.(*net.TCPConn).CloseWrite()
	}
	bufio.NewReader(conn).ReadString('\n') // an answer, or that there will be none
}

const (
	oneChunk    = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n"
	brokenEvent = "stream_broken"
)

// cut sends a part of an answer and closes the connection.
func cut(header map[string]string, part string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		rw.WriteString("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
		for name, value := range header {
			fmt.Fprintf(rw, "%s: %s\r\n", name, value)
		}
		body := part
		if header["Content-Length"] == "" {
			body = fmt.Sprintf("%x\r\n%s\r\n", len(part), part) // and no last chunk
			rw.WriteString("Transfer-Encoding: chunked\r\n")
		}
		rw.WriteString("\r\n" + body)
		rw.Flush()
	}
}

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

// together has 32 clients request a stream each at the same time.
func (s *server) together(t *testing.T, header ...string) []answer {
	t.Helper()
	answers := make([]answer, 32)
	atOnce(len(answers), func(i int) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		answers[i] = s.chat(ctx, ask(fmt.Sprintf("client %d: %s", i, strings.Repeat("why? ", 40))).streamed(), header...)
	})
	return answers
}

// TestPrefillIsNoPause has a first byte that takes longer than stream_idle.
func TestPrefillIsNoPause(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{FirstToken: 1500 * time.Millisecond, Words: 5})
	s := startCaddy(t, route(engines, "timeouts {\nstream_idle 1s\n}"))
	s.mustChat(t, ask("long prompt").streamed())
	s.booksAtZero(t)
}

// readEvents reads a chat's answer, closes read when n events have come, and
// goes on until ctx ends.
func (s *server) readEvents(ctx context.Context, c chat, n int, read chan<- struct{}) {
	resp, err := s.open(ctx, http.MethodPost, atChat, bytes.NewReader(c.body()))
	if err != nil {
		return
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "data: ") {
			if n--; n == 0 {
				close(read)
			}
		}
	}
}

// TestBrokenStreams breaks streams. The client gets the engine's bytes and one error event,
// or none if none can be added, and the connection breaks. No other engine is asked.
func TestBrokenStreams(t *testing.T) {
	const packed = "no events, as it is compressed"
	for _, v := range []struct {
		name   string
		h      http.HandlerFunc
		part   string
		added  bool
		marked int
	}{
		{"PlainStream", cut(nil, oneChunk), oneChunk, true, 1},
		{"Stalled", stall(nil, oneRole, oneChunk), oneRole + oneChunk, true, 1},
		{"Compressed", cut(map[string]string{"Content-Encoding": "br"}, packed), packed, false, 1},
		{"WithALength", cut(map[string]string{"Content-Length": "400"}, oneChunk), oneChunk, false, 1},
		{"AfterDone", cut(nil, oneChunk+"data: [DONE]\n\n"), oneChunk + "data: [DONE]\n\n", false, 0},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			pool := `pool="cut-` + v.name + `"`
			s := startCaddy(t, route(engines, "pool cut-"+v.name, "timeouts {\nstream_idle 200ms\n}"))
			before := s.scrape(t)
			for _, e := range engines {
				e.SetHandler(inferencesOnly(v.h))
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			a := s.chat(ctx, ask("x").streamed())
			if whole := v.name == "AfterDone"; a.status != http.StatusOK || (a.err == nil) != whole {
				t.Errorf("status %d, error %v; want 200 and an unexpected end, except behind the answer's", a.status, a.err)
			}
			events := map[bool]int{true: 1}[v.added]
			if !strings.HasPrefix(string(a.body), v.part) || strings.Count(string(a.body), brokenEvent) != events || !v.added && string(a.body) != v.part {
				t.Errorf("got %q, want %q and %d events more", a.body, v.part, events)
			}
			unreadable := map[bool]float64{true: 1}[v.part == packed]
			s.wantFigures(t, before, []figure{
				{fallbacksTotal, []string{pool, `reason="answer_unreadable"`}, unreadable}, {requestsTotal, []string{pool}, 1}, {retriesTotal, []string{pool}, 0},
			})
			s.booksAtZero(t)
			equal(t, s.logged(t, markedDown), v.marked, "workers marked down")
		})
	}
}

// inferencesOnly answers GET requests, the router's own, with 404.
func inferencesOnly(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			http.NotFound(w, r)
			return
		}
		h(w, r)
	}
}

// TestFirstTokenOfNobody has engines that produce no first token. The client gets an error event
// in the shape of the API. The router tries two engines.
func TestFirstTokenOfNobody(t *testing.T) {
	engines := startEngines(t, 6, canned.Pace{})
	s := startCaddy(t, route(engines, "pool first-nobody", "timeouts {\nfirst_token 200ms\n}"))
	for _, e := range engines {
		e.SetHandler(stall(nil, oneRole))
	}
	before := s.scrape(t)
	a := s.chat(t.Context(), ask("anybody?").streamed())
	if n := totalOf(engines); n != 2 || a.err == nil || strings.Count(string(a.body), brokenEvent) != 1 {
		t.Errorf("%d attempts, status %d, error %v, body %q; want two and an error event", n, a.status, a.err, a.body)
	}
	setAll(engines, stall(nil, ": ping\n\n", ": ping\n\n")) // comments are no tokens
	a = s.post(t.Context(), "/v1/messages", []byte(`{"model":"canned","max_tokens":9,"stream":true,"messages":[{"role":"user","content":"hi"}]}`))
	if a.err == nil || !strings.Contains(string(a.body), `"type":"error"`) || strings.Count(string(a.body), brokenEvent) != 1 {
		t.Errorf("status %d, error %v, body %q; want Anthropic's shape of it", a.status, a.err, a.body)
	}
	s.booksAtZero(t)
	s.wantFigures(t, before, []figure{{requestsTotal, []string{`pool="first-nobody"`, `outcome="broken"`}, 2}})
}

// TestStreamsOfOtherShapesAreNotLate has engines that send tokens in time, in forms that
// the router cannot read.
func TestStreamsOfOtherShapesAreNotLate(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	engines[0].SetHandler(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 100 {
			fmt.Fprintf(w, "data: %s\n\n", r.Header.Get("X-Event"))
			http.NewResponseController(w).Flush()
			pausing(r.Context(), 20*time.Millisecond)
		}
		io.WriteString(w, "data: [DONE]\n\n")
	})
	s := startCaddy(t, route(engines, "timeouts {\nfirst_token 1500ms\n}"))
	var clients sync.WaitGroup
	for _, event := range []string{
		`{"id":"x","choices":[{"index":0,"delta":{"reasoning_text":"word"}}]}`,
		`{"token":{"text":"word"}}`, `{"content":"word"}`, `{"message":{"content":"word"}}`,
	} {
		clients.Go(func() {
			if a := s.chat(t.Context(), ask("x").streamed(), "X-Event", event); a.status != http.StatusOK || !strings.HasSuffix(string(a.body), "data: [DONE]\n\n") {
				t.Errorf("%s: status %d, error %v, body %.200q", event, a.status, a.err, a.body)
			}
		})
	}
	clients.Wait()
}

// TestClientThatLeavesIsNoticed lets clients leave at each stage of an answer that takes longer than
// the test. The engine must notice, to stop computing, and nothing may stay booked.
func TestClientThatLeavesIsNoticed(t *testing.T) {
	for _, v := range []struct {
		name, block string
		pace        canned.Pace
		fault       canned.Fault
		stream      bool
		events      int // read before leaving
	}{
		{name: "BeforeTheHeader", fault: canned.Fault{Kind: canned.HangBeforeHeader}, stream: true},
		{name: "BeforeTheFirstToken", pace: canned.Pace{FirstToken: time.Hour}, stream: true},
		{name: "BeforeAHeldAnswer", pace: canned.Pace{FirstToken: time.Hour}, stream: true, block: "timeouts {\nfirst_token 1h\n}"},
		{name: "InMidStream", pace: canned.Pace{Words: 4000, PerWord: 20 * time.Millisecond}, stream: true, events: 5},
		{name: "BeforeAnAnswerThatIsNotStreamed", pace: canned.Pace{FirstToken: time.Hour}},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, 2, v.pace)
			for _, e := range engines {
				e.SetFault(v.fault)
			}
			s := startCaddy(t, route(engines, v.block, maxRunning(1)))
			before := s.scrape(t)
			c := ask("are you still there?")
			c.Stream = v.stream
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			read := make(chan struct{})
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				s.readEvents(ctx, c, v.events, read)
			}()
			active := func() int { return engines[0].Active() + engines[1].Active() }
			eventually(t, "an engine has the request", func() bool { return active() == 1 })
			if v.events > 0 {
				select {
				case <-read:
				case <-time.After(patience):
					t.Fatal("the stream does not come")
				}
			}
			equal(t, s.scrape(t).value(leases), 1, "leases while the engine computes")
			leave()
			<-gone
			eventually(t, "the engine notices", func() bool { return active() == 0 })
			j := append(engines[0].Journal(), engines[1].Journal()...)
			if len(j) != 1 || j[0].Left.IsZero() {
				t.Fatalf("%d requests at the engines, the first left at %v", len(j), j[0].Left)
			}
			s.slotsFree(t)
			s.wantFigures(t, before, []figure{{requestsTotal, []string{`outcome="client_gone"`}, 1}, {retriesTotal, nil, 0}})
			// The engine is no worse for it.
			equal(t, s.logged(t, markedDown), 0, "workers marked down")
			for _, e := range engines {
				e.SetFault(canned.Fault{})
				e.SetPace(canned.Pace{})
			}
			s.mustChat(t, ask("and now?"))
		})
	}
}

// oddEvents is a stream with everything that server-sent events allow.
const oddEvents = ": welcome\n\n" +
	"\xef\xbb\xbfid: 1\r\nevent: delta\r\ndata: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\r\n\r\n" +
	":\n" +
	"data:{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n" +
	"retry: 1000\n\n" +
	"event: other\ndata: not JSON at all\ndata: on two lines\n\n" +
	"data: {\"choices\":[{\"index\":0,\ndata: \"delta\":{\"content\":\"b\"}}]}\n\n" +
	"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"c\"}}],\"usage\":null}\r\r" +
	"unknown: field\n\n" +
	": ping - 2026-01-01 00:00:00\r\n\r\n" +
	"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n" +
	"data: [DONE]\n\n" +
	": goodbye, and no newline"

// TestStreamPassesByteForByte writes a stream in pieces of many sizes, so that
// events and lines are cut everywhere.
func TestStreamPassesByteForByte(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "timeouts {\nfirst_token 1h\nstream_idle 1h\n}"))
	for _, size := range []int{1, 2, 3, 7, 64, len(oddEvents)} {
		engines[0].SetHandler(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for rest := oddEvents; rest != ""; {
				n := min(size, len(rest))
				io.WriteString(w, rest[:n])
				w.(http.Flusher).Flush()
				rest = rest[n:]
			}
		})
		a := s.chat(t.Context(), ask("go on").streamed())
		if string(a.body) != oddEvents || a.err != nil {
			t.Errorf("pieces of %d: error %v, got %q, want %q", size, a.err, a.body, oddEvents)
		}
	}
	s.booksAtZero(t)
}

// TestUpgradesThatNobodySpeaksEndHere sends what Java's HttpClient and curl --http2 offer.
func TestUpgradesThatNobodySpeaksEndHere(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, route([]*canned.Engine{e}))
	body := string(ask("hello h2c").body())
	for _, v := range []struct {
		request, offer string
		passes         bool
	}{
		{"POST " + atChat, "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA", false},
		{"POST /v1/audio/transcriptions", "Connection: HTTP2-Settings, Upgrade\r\nUpgrade: H2C\r\nHTTP2-Settings: AAMAAABk", false},
		{"GET /v1/models", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: foo, h2c\r\nHTTP2-Settings: AAMAAABk", false},
		{"POST " + atChat, "Connection: Upgrade\r\nUpgrade: TLS/1.3", false},
		{"POST " + atChat, "Connection: Upgrade\r\nUpgrade: websocket", false},
		{"GET /v1/other", "Connection: Upgrade\r\nUpgrade: TLS/1.3", true},
	} {
		conn := s.connect(t)
		conn.SetDeadline(time.Now().Add(patience))
		fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: %s\r\n%s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", v.request, s.addr, v.offer, len(body), body)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("%s, %s: %v", v.request, v.offer, err)
		}
		got := lastOf(e)
		if passes := got.Header.Get("Upgrade") != ""; passes != v.passes || got.Header.Get("HTTP2-Settings") != "" || string(got.Body) != body {
			t.Errorf("%s, %s: status %d, the engine got %v and %q", v.request, v.offer, resp.StatusCode, got.Header, got.Body)
		}
		conn.Close()
	}
}
