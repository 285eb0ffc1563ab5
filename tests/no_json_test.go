package tests

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestWhatIsNoJSONPasses has an engine that orders by priority, for which no client has
// the grant. Sounds, images and forms carry no priority. They pass at any length.
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

// TestUploadsAreStreamed has clients send the rest of their bodies only after the engine
// has received the beginning.
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

// TestContentTypeDoesNotGetAroundMaxRunning sends inferences whose Content-Type is not
// JSON, some of them unreadable. Each takes a slot.
func TestContentTypeDoesNotGetAroundMaxRunning(t *testing.T) {
	h := startGated(t, 1)
	chat := string(ask("hi").body())
	for _, c := range []struct{ body, coding string }{
		{"\xef\xbb\xbf" + chat, "identity"},
		{"\x1f\x8b" + chat, "gzip"},
		{chat, "identity"},
	} {
		header := []string{"Content-Type", "text/plain", "Content-Encoding", c.coding}
		first := h.start(t, atChat, c.body, header...)
		runs(t, h.gates[0], 1)
		second := h.start(t, atChat, c.body, header...)
		h.wantWaiting(t, 1)
		for range 2 {
			h.gates[0].pass(t, http.StatusOK)
		}
		h.wantServed(t, "", first, second)
	}
}

// TestGRPCServerMaySpeakFirst has an engine send its header before the client sends
// a byte of the body.
func TestGRPCServerMaySpeakFirst(t *testing.T) {
	var both http.Protocols
	both.SetHTTP1(true)
	both.SetUnencryptedHTTP2(true)
	addr := serveProtocols(t, &both, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		http.NewResponseController(w).Flush()
		io.Copy(w, r.Body)
	})
	s := startCaddy(t, "kv_router {\nreverse_proxy "+addr+" {\ntransport http {\nversions h2c\n}\n}\n}", "servers {\nprotocols h1 h2 h2c\n}")
	var h2 http.Protocols
	h2.SetUnencryptedHTTP2(true)
	c := &http.Client{Transport: &http.Transport{Protocols: &h2}}
	for _, path := range []string{"/invocations", "/pkg.Service/Method"} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		in, out := io.Pipe()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+path, in)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/grpc+proto")
		resp, err := c.Do(req)
		if err != nil {
			t.Errorf("%s: %v", path, err)
		} else {
			go func() {
				io.WriteString(out, "\x00hello")
				out.Close()
			}()
			if got, err := io.ReadAll(resp.Body); string(got) != "\x00hello" {
				t.Errorf("%s: the engine echoed %q, error %v", path, got, err)
			}
			resp.Body.Close()
		}
		out.Close()
		cancel()
	}
	s.slotsFree(t)
}
