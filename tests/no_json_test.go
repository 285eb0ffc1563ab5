package tests

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestWhatIsNoJSONPasses has an engine that orders by priorities, which nobody is
// trusted with: sounds, images and forms say nothing of that, however long.
func TestWhatIsNoJSONPasses(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, route([]*canned.Engine{e}, typed(e, "sglang", "priority on"), "max_body 40KiB"))
	form := "--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n" + strings.Repeat("sound ", 20000) + "\r\n--b--\r\n"
	for _, path := range []string{"/v1/chat/completions", "/v1/audio/transcriptions", "/vertex_generate", "/upload"} {
		for _, c := range []struct{ name, kind, body string }{
			{"sound", "audio/wav", "RIFF" + strings.Repeat("\x00", 100)},
			{"image", "image/png", "\x89PNG\r\n" + strings.Repeat("\x00", 100)},
			{"fields", "application/x-www-form-urlencoded", "a=b&c=d"},
			{"form", "multipart/form-data; boundary=b", form},
			{"form behind a line", "multipart/form-data; boundary=b", "\r\n" + form},
			{"form behind a preamble", "multipart/form-data; boundary=b", "preamble\r\n" + form},
			{"nothing", "application/json", ""},
			{"space", "text/plain", "  "},
			{"a list", "application/json", "[1,2]"},
		} {
			a := s.sendBy(t, http.MethodPost, path, c.body, "Content-Type", c.kind)
			if path == "/v1/chat/completions" && strings.Contains(string(a.body), "invalid JSON:") {
				a.status = 200 // the engine has judged it
			}
			if got := string(lastOf(e).Body); a.status != 200 || got != c.body {
				t.Errorf("%s to %s: status %d, %.200s; the engine got %d of %d bytes", c.name, path, a.status, a.body, len(got), len(c.body))
			}
		}
	}
	s.booksAtZero(t)
	if n := s.bodyBytes(t); n != 0 {
		t.Errorf("%d bytes of bodies are kept", n)
	}
}

// TestUploadsAreStreamed has clients send the rest of their bodies when the engine
// has got the beginning.
func TestUploadsAreStreamed(t *testing.T) {
	begun := make(chan struct{}, 1)
	addr := serveRaw(t, func(_ http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadFull(r.Body, make([]byte, 5)); err == nil {
			begun <- struct{}{}
		}
		io.Copy(io.Discard, r.Body)
	})
	s := startCaddy(t, "kv_router "+addr)
	for _, c := range []struct{ name, head string }{
		{"PutOfAnything", "PUT /foo HTTP/1.1\r\n"},
		{"PutOfJSON", "PUT /foo HTTP/1.1\r\nContent-Type: application/json\r\n"},
		{"PostOfUnknownLength", "POST /foo HTTP/1.1\r\n"},
		{"GetWithABody", "GET /foo HTTP/1.1\r\n"},
		{"Sound", "POST /v1/audio/transcriptions HTTP/1.1\r\nContent-Type: audio/wav\r\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := s.connect(t)
			fmt.Fprintf(conn, "%sHost: %s\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", c.head, s.addr)
			select {
			case <-begun:
			case <-time.After(5 * time.Second):
				t.Fatal("the engine has not got the beginning")
			}
			fmt.Fprint(conn, "5\r\nworld\r\n0\r\n\r\n")
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Errorf("status %d", resp.StatusCode)
			}
		})
	}
}

// TestStreamedBodiesAreLetGoOf has a body that is longer than is read, and an answer
// that goes on when it was sent.
func TestStreamedBodiesAreLetGoOf(t *testing.T) {
	answered := make(chan struct{})
	addr := serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		if r.Method != http.MethodPost {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, ": %d\n\n", n)
		http.NewResponseController(w).Flush()
		<-answered
	})
	s := startCaddy(t, "kv_router "+addr+" {\nmax_body 1MiB\n}")
	conn := s.connect(t)
	defer close(answered)
	const size = 3 << 20
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n",
		s.addr, size, strings.Repeat("x", size))
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	if err != nil || line != fmt.Sprintf(": %d\n", size) {
		t.Fatalf("%q, %v", line, err)
	}
	if n := s.bodyBytes(t); n != 0 {
		t.Errorf("%d bytes are kept while the answer goes on", n)
	}
}
