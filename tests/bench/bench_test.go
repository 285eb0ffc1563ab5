package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/caddy-kvrouter/kvrouter"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

// TestMain lets the test binary be the upstreams, as the program itself can.
func TestMain(m *testing.M) {
	if isMock(os.Args[1:]) {
		main()
		return
	}
	if len(os.Args) > 1 && slices.Contains([]string{"run", "reverse-proxy"}, os.Args[1]) {
		caddycmd.Main() // as the contenders
		return
	}
	os.Exit(m.Run())
}

func TestIncompleteAnswersAreErrors(t *testing.T) {
	const sse, plain = "text/event-stream; charset=utf-8", "application/json"
	for _, c := range []struct {
		contentType, end string
		good             bool
	}{
		{sse, "data: {}\n\ndata: [DONE]\n\n", true},
		{sse, "data: {}\n\n", false},
		{plain, `{"choices":[],"usage":{"prompt_tokens":1}}`, true},
		{plain, `{"choices":[],"usage":{"prompt_t`, false},
		{plain, `{"error":{}}`, false},
	} {
		if err := whole(c.contentType, []byte(c.end)); (err == nil) != c.good {
			t.Errorf("%q: %v", c.end, err)
		}
	}
}

// Each contender's requests are what its name says. Conversations share a system
// prompt, no body comes twice, and bodies have the size of their cell.
func TestTrafficIsOfItsKind(t *testing.T) {
	c := cell{name: "x", size: 2000, conversations: 3}
	for _, con := range builtin() {
		var seen [][]byte
		var path string
		mock := newMock()
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			path, seen, r.Body = r.URL.Path, append(seen, body), io.NopCloser(bytes.NewReader(body))
			mock.ServeHTTP(w, r)
		}))
		var seq atomic.Int64
		seq.Store(firstNumber)
		there := *con
		there.url = srv.URL
		one := client{load: newLoad(&there, c, make(map[traffic]*corpus), &seq), buf: make([]byte, 4096), transport: &http.Transport{}}
		for range 2 * c.conversations {
			if err := one.send(t.Context(), seq.Add(1)); err != nil {
				t.Fatal(err)
			}
		}
		one.transport.CloseIdleConnections()
		srv.Close()
		keys := make(map[string]bool)
		for i, b := range seen {
			var body struct {
				Prompt []int
				Nvext  struct {
					Session struct {
						ID string `json:"session_id"`
					} `json:"session_control"`
				}
			}
			if err := json.Unmarshal(b, &body); err != nil {
				t.Fatalf("%s: %v", b, err)
			}
			if ids := len(body.Prompt) > 0; ids != (con.traffic == tokens) || strings.HasSuffix(path, "/chat/completions") == ids {
				t.Errorf("%s: path %s, token ids: %t", con.name, path, ids)
			}
			if len(b) > c.size || len(b) < c.size-10 {
				t.Errorf("%s: a body of %d bytes", con.name, len(b))
			}
			if i > 0 && (bytes.Equal(b, seen[i-1]) || !bytes.Equal(b[:c.size/5], seen[i-1][:c.size/5])) {
				t.Errorf("%s: the same body twice, or another system prompt", con.name)
			}
			keys[body.Nvext.Session.ID] = true
		}
		if want := map[bool]int{true: 3, false: 1}[con.traffic == sessions]; len(keys) != want {
			t.Errorf("%s: %d session keys, want %d", con.name, len(keys), want)
		}
	}
}

// The whole program, briefly: all built-in contenders and one of -with.
func TestBenchRuns(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var tables, progress bytes.Buffer
	err := run(ctx, []string{
		"-caddy", os.Args[0], "-rounds", "1", "-time", "100ms", "-warmup", "50ms", "-cells", "1k-c1,16k-s100-c32", "-before", os.Args[0],
		"-with", "second=0=exec {caddy} reverse-proxy --from http://127.0.0.1:{port} --to {upstream1} --to {upstream2}",
	}, &tables, &progress)
	if err != nil {
		t.Fatalf("%v\n%s", err, progress.String())
	}
	text := tables.String()
	for _, want := range []string{"kv_router-session", "kv_router-tokens", "second", "ratios to before", "CPU time per request", "No contender had errors."} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	// Four metrics, two cells, and ratios of all contenders but the base.
	if _, err := processTree(os.Getpid()); err == nil && strings.Count(text, "x") < 4*2*4 || strings.Contains(text, "–") {
		t.Errorf("figures are missing:\n%s", text)
	}
}
