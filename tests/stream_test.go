package tests

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

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
	s := startCaddy(t, route(engines))
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

// TestEventsComeAsTheyAreSent has an engine that sends the next part only after the client
// has received the one before.
func TestEventsComeAsTheyAreSent(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines))
	seen := make(chan struct{})
	lines := []string{": ping", `data: {"choices":[{"index":0,"delta":{"content":"a"}}]}`, ": ping", "data: [DONE]"}
	engines[0].SetHandler(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, line := range lines {
			fmt.Fprint(w, line, "\n\n")
			w.(http.Flusher).Flush()
			select {
			case <-seen:
			case <-r.Context().Done():
				return
			}
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/v1/chat/completions", strings.NewReader(string(ask("go").streamed().body())))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	scanner := bufio.NewScanner(resp.Body)
	for _, want := range lines {
		if !scanner.Scan() || scanner.Text() != want || !scanner.Scan() {
			t.Fatalf("got %q, error %v, want %q", scanner.Text(), scanner.Err(), want)
		}
		seen <- struct{}{}
	}
}

// TestUpgradePasses takes a connection through a protocol upgrade and talks over it both
// ways. The client ends its direction first.
func TestUpgradePasses(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	for _, e := range engines {
		e.SetHandler(func(w http.ResponseWriter, r *http.Request) {
			conn, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer conn.Close()
			fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", r.Header.Get("Upgrade"))
			rw.Flush()
			for {
				line, err := rw.ReadString('\n')
				if err != nil { // the client has ended its direction
					io.WriteString(conn, "bye")
					return
				}
				rw.WriteString("echo " + line)
				rw.Flush()
			}
		})
	}
	s := startCaddy(t, route(engines))
	for _, path := range []string{"/v1/realtime?model=m", "/v1/chat/completions"} {
		conn := s.connect(t)
		conn.SetDeadline(time.Now().Add(5 * time.Second))
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", path, s.addr)
		in := bufio.NewReader(conn)
		resp, err := http.ReadResponse(in, nil)
		if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("%s: %v, error %v", path, resp, err)
		}
		for _, word := range []string{"one\n", "two\n"} {
			io.WriteString(conn, word)
			if line, err := in.ReadString('\n'); line != "echo "+word {
				t.Errorf("%s: got %q, error %v", path, line, err)
			}
		}
		if half, ok := conn.(*net.TCPConn); !ok || half.CloseWrite() != nil {
			t.Fatal("the client cannot end its direction")
		}
		if end, err := io.ReadAll(in); string(end) != "bye" {
			t.Errorf("%s: at its end got %q, error %v", path, end, err)
		}
		conn.Close()
	}
	s.booksAtZero(t)
}
