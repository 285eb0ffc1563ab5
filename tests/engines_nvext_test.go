package tests

import (
	"bytes"
	"encoding/json"
	"net/http"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// asks are the requests that carry them.
var asks = []struct{ name, path, body string }{
	{"chat", "/v1/chat/completions", `{"model":"sim-8b",@"messages":[{"role":"user","content":"hi"}],"max_tokens":2}`},
	{"chat, streamed", "/v1/chat/completions", `{"stream":true,@"model":"sim-8b","messages":[{"role":"user","content":"hi"}],"max_tokens":2}`},
	{"completions", "/v1/completions", `{@"model":"sim-8b","prompt":"hi","max_tokens":2}`},
	{"completions, streamed", "/v1/completions", `{@"prompt":"hi","max_tokens":2,"model":"sim-8b","stream":true}`},
	{"generate", "/generate", `{@"text":"hi","sampling_params":{"max_new_tokens":2,"temperature":1}}`},
}

// receivedBy posts a request and returns what the engine received. Engines refuse no
// request but a turn of a session that was not opened.
func (s *server) receivedBy(t *testing.T, e *engine.Engine, path, body string, header ...string) engine.Record {
	t.Helper()
	met := len(e.Journal())
	a := s.post(t.Context(), path, []byte(body), header...)
	for _, r := range e.Journal()[met:] {
		if r.Path == path {
			unknown := path == "/generate" && bytes.Contains(r.Body, []byte(`"session_params"`))
			if want := map[bool]int{true: http.StatusBadRequest, false: http.StatusOK}[unknown]; a.status != want || r.BodyBytes != len(r.Body) {
				t.Errorf("status %d, want %d: %s became %s, answered by %.300s", a.status, want, body, r.Body, a.body)
			}
			if !json.Valid(r.Body) {
				t.Errorf("%s became %s", body, r.Body)
			}
			return r
		}
	}
	t.Fatalf("the engine was not asked: status %d, error %v, body %.300q", a.status, a.err, a.body)
	return engine.Record{}
}
