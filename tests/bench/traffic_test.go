package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// recorder is a mock that remembers what it was sent.
type recorder struct {
	mock
	mu   sync.Mutex
	seen []recorded
}

type recorded struct {
	path   string
	header http.Header
	body   []byte
}

// ServeHTTP implements http.Handler.
func (r *recorder) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	r.seen = append(r.seen, recorded{req.URL.Path, req.Header.Clone(), body})
	r.mu.Unlock()
	req.Body = io.NopCloser(bytes.NewReader(body))
	r.mock.ServeHTTP(w, req)
}

// record has a contender's load sent to a recorder: each conversation twice.
func record(t *testing.T, con *contender, c cell) []recorded {
	t.Helper()
	rec := &recorder{mock: mock{buffers: sync.Pool{New: func() any { return new(bytes.Buffer) }}}}
	srv := httptest.NewServer(rec)
	defer srv.Close()
	var seq atomic.Int64
	seq.Store(firstNumber)
	there := *con
	there.urls = []string{srv.URL}
	l := newLoad(&there, c, make(map[traffic]*corpus), &seq)
	one := client{load: l, url: srv.URL + l.path, buf: make([]byte, 4096), transport: &http.Transport{}}
	defer one.transport.CloseIdleConnections()
	for range 2 * c.conversations {
		if _, err := one.send(t.Context(), seq.Add(1)); err != nil {
			t.Fatal(err)
		}
	}
	return rec.seen
}

// Each contender's requests reach the engine as its name says. The session is
// in the body, in the header, or absent; the prompt is a chat or token ids.
func TestTrafficIsOfItsKind(t *testing.T) {
	const inHeader, inBody = "header", "body"
	sessionIn := map[string]string{"kv_router-session": inBody, "kv_router-header": inHeader}
	c := cell{name: "x", size: 2000, conversations: 3}
	for _, con := range builtin() {
		t.Run(con.name, func(t *testing.T) {
			seen := record(t, con, c)
			if len(seen) != 2*c.conversations {
				t.Fatalf("%d requests", len(seen))
			}
			keys := make(map[string]string) // of each conversation's text
			for _, r := range seen {
				header, body, text, isTokens := r.parts(t)
				key := header + body
				want := sessionIn[con.name]
				if (header != "") != (want == inHeader) || (body != "") != (want == inBody) {
					t.Errorf("session %q in the header, %q in the body", header, body)
				}
				if wantTokens := con.name == "kv_router-tokens"; isTokens != wantTokens || strings.HasSuffix(r.path, "/chat/completions") == wantTokens {
					t.Errorf("path %s, token ids: %t", r.path, isTokens)
				}
				if before, again := keys[text]; again && before != key {
					t.Errorf("one conversation has the keys %q and %q", before, key)
				}
				keys[text] = key
			}
			different := make(map[string]bool)
			for _, key := range keys {
				different[key] = true
			}
			wantKeys := 1 // the empty one
			if sessionIn[con.name] != "" {
				wantKeys = c.conversations
			}
			if len(keys) != c.conversations || len(different) != wantKeys {
				t.Errorf("%d conversations with %d keys", len(keys), len(different))
			}
		})
	}
}

// parts returns the session in the header and in the body, and the prompt
// without its number, which is the last word or token.
func (r *recorded) parts(t *testing.T) (header, session, text string, isTokens bool) {
	t.Helper()
	var body struct {
		Messages []struct{ Content string }
		Prompt   []json.Number
		Nvext    struct {
			Session struct {
				ID string `json:"session_id"`
			} `json:"session_control"`
		}
	}
	mustRead(t, string(r.body), &body)
	if n := len(body.Prompt); n > 0 {
		for _, id := range body.Prompt[:n-1] {
			text += id.String() + ","
		}
	} else {
		for _, m := range body.Messages {
			text += m.Content + "\n"
		}
		text = text[:strings.LastIndexByte(text, ' ')]
	}
	return r.header.Get("X-Session-Id"), body.Nvext.Session.ID, text, len(body.Prompt) > 0
}
