package tests

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// drip is an upload that takes its time.
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

// serveRaw starts an engine that does not read its requests before h has them.
func serveRaw(t *testing.T, h http.HandlerFunc) (addr string) {
	t.Helper()
	return serveProtocols(t, nil, h)
}

// serveProtocols is serveRaw with certain protocols, nil for the usual ones.
func serveProtocols(t *testing.T, protocols *http.Protocols, h http.HandlerFunc) (addr string) {
	t.Helper()
	ln, err := canned.Listen()
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h, Protocols: protocols, ReadHeaderTimeout: time.Minute}
	go srv.Serve(ln)
	t.Cleanup(func() { srv.Close() })
	return ln.Addr().String()
}

// TestAnswerBeforeTheUploadEnds streams uploads to engines that refuse before
// they have read them: what was read cannot be sent again, so the refusal is
// the answer. The race detector watches what the two directions share.
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
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+v[0], &drip{1 << 17, ctx})
			if err != nil {
				t.Fatal(err)
			}
			if v[1] != "" {
				req.Header.Set("Content-Encoding", v[1])
			}
			a := s.do(req)
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
		if n := asked.Swap(0); n != 4 {
			t.Errorf("%q: the engines were asked %d times for 4 requests: what is left of an upload was sent to another", v, n)
		}
	}
	s.booksAtZero(t)
}

// TestBrokenUploadIsNoEnginesFault has a client that breaks its uploads, beside
// another whose session must not move for it.
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
				eventually(t, 5*time.Second, "the broken request is over", func() bool {
					m := s.scrape(t)
					return m.value(requestsTotal, `pool="`+v.name+`"`)-before.value(requestsTotal, `pool="`+v.name+`"`) == float64(2*i+1)
				})
				if e := s.mustChat(t, hello, "X-Session-Id", "victim").engine(); e != home {
					t.Errorf("the session moved from %s to %s after %d broken uploads", home, e, i+1)
					home = e
				}
			}
			if n := s.logged(t, markedDown); n != 0 {
				t.Errorf("%d workers were marked down for it", n)
			}
			s.booksAtZero(t)
		})
	}
}

// spoil sends a request by hand, and no more of it than there is.
func (s *server) spoil(t *testing.T, head, body string) {
	t.Helper()
	conn := s.connect(t)
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
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

// cut sends a part of an answer, and then the connection is no more.
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

// TestNoEventIsAddedWhereNoneFits breaks streams that cannot take one more
// event. The client gets the engine's bytes and a connection that breaks.
func TestNoEventIsAddedWhereNoneFits(t *testing.T) {
	const packed = "no events, as it is compressed"
	for _, v := range []struct {
		name   string
		header map[string]string
		part   string
		added  bool
		marked int
	}{
		{"PlainStream", nil, oneChunk, true, 1},
		{"Compressed", map[string]string{"Content-Encoding": "br"}, packed, false, 1},
		{"WithALength", map[string]string{"Content-Length": "400"}, oneChunk, false, 1},
		{"AfterDone", nil, oneChunk + "data: [DONE]\n\n", false, 0},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, 1, canned.Pace{})
			pool := `pool="cut-` + v.name + `"`
			s := startCaddy(t, route(engines, "pool cut-"+v.name))
			before := s.scrape(t)
			engines[0].SetHandler(cut(v.header, v.part))
			a := s.chat(t.Context(), ask("x").streamed())
			if a.status != http.StatusOK || a.err == nil {
				t.Errorf("status %d, error %v; want 200 and an unexpected end", a.status, a.err)
			}
			if v.added {
				if !strings.HasPrefix(string(a.body), v.part) || strings.Count(string(a.body), brokenEvent) != 1 {
					t.Errorf("got %q, want %q and one event more", a.body, v.part)
				}
			} else if string(a.body) != v.part {
				t.Errorf("got %q, want %q", a.body, v.part)
			}
			unreadable := 0.0
			if v.header["Content-Encoding"] != "" {
				unreadable = 1
			}
			s.wantFigures(t, before, []figure{{fallbacksTotal, []string{pool, `reason="answer_unreadable"`}, unreadable}})
			s.booksAtZero(t) // it is noted before the lease's end who is to blame
			eventually(t, 2*time.Second, "the request is counted", func() bool {
				return s.scrape(t).value(requestsTotal, pool) == before.value(requestsTotal, pool)+1
			})
			if n := s.logged(t, markedDown); n != v.marked {
				t.Errorf("%d workers were marked down, want %d", n, v.marked)
			}
		})
	}
}

// TestCompressedAnswerPasses has an engine that compresses without being asked,
// and not with gzip. The bytes pass, and the router counts that it cannot read
// them.
func TestCompressedAnswerPasses(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "pool packed"))
	before := s.scrape(t)
	const body = "what no reader knows"
	engines[0].SetHandler(func(w http.ResponseWriter, r *http.Request) {
		if got := r.Header.Get("Accept-Encoding"); got != "identity" {
			t.Errorf("Accept-Encoding %q, want identity", got)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set("Content-Encoding", "br")
		io.WriteString(w, body)
	})
	for range 3 {
		a := s.chat(t.Context(), ask("x").streamed())
		if a.status != http.StatusOK || a.err != nil || string(a.body) != body || a.header.Get("Content-Encoding") != "br" {
			t.Errorf("status %d, error %v, coding %q, body %q", a.status, a.err, a.header.Get("Content-Encoding"), a.body)
		}
	}
	s.wantFigures(t, before, []figure{
		{fallbacksTotal, []string{`pool="packed"`, `reason="answer_unreadable"`}, 3},
		{fallbacksTotal, []string{`pool="packed"`}, 3},
		{requestsTotal, []string{`pool="packed"`, `outcome="ok"`}, 3},
	})
	s.booksAtZero(t)
}

// TestErrorEventLeavesNoOverlap has an answer whose first event is an error, in
// spite of its status: the engine has not computed the prompt.
func TestErrorEventLeavesNoOverlap(t *testing.T) {
	for _, v := range []struct{ name, kind, body string }{
		{"Streamed", "text/event-stream", "data: {\"error\":{\"message\":\"out of memory\"}}\n\ndata: [DONE]\n\n"},
		{"Whole", "application/json", `{"error":{"message":"out of memory"}}`},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, "response_headers X-KV-"))
			c := ask(strings.Repeat("some words ", 300))
			c.Stream = v.name == "Streamed"
			for _, e := range engines {
				e.SetHandler(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Content-Type", v.kind)
					io.WriteString(w, v.body)
				})
			}
			for i := range 4 {
				a := s.chat(t.Context(), c)
				s.booksAtZero(t) // its lease has ended
				if overlap := a.header.Get("X-KV-Overlap-Blocks"); string(a.body) != v.body || overlap != "0" {
					t.Errorf("request %d: %q blocks overlap, body %q", i+1, overlap, a.body)
				}
			}
			for _, e := range engines {
				e.SetHandler(nil)
			}
			s.mustChat(t, c)
			if a := s.mustChat(t, c); a.header.Get("X-KV-Overlap-Blocks") == "0" {
				t.Error("a good answer leaves no overlap")
			}
		})
	}
}
