package engine

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// start starts an engine that is closed with the test.
func start(t *testing.T, cfg Config) *Engine {
	t.Helper()
	if cfg.Speed == 0 {
		cfg.Speed = 100
	}
	e, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// eventually polls until ok, for at most five seconds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so within 5 s: %s", what)
		}
	}
}

// reply is what a client got.
type reply struct {
	status int // 0 when not even a header came
	header http.Header
	body   []byte
	err    error
}

// post sends one request on a connection of its own. The body is JSON, or
// anything that becomes it. Headers are pairs of name and value.
func post(ctx context.Context, url string, body any, header ...string) reply {
	var data []byte
	switch b := body.(type) {
	case string:
		data = []byte(b)
	default:
		data, _ = json.Marshal(b)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(data))
	if err != nil {
		return reply{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	return send(req, header...)
}

func get(ctx context.Context, url string) reply {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return reply{err: err}
	}
	return send(req)
}

func send(req *http.Request, header ...string) reply {
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: body, err: err}
}

// doc is JSON of any shape.
type doc map[string]any

// at returns what stands at a path of names and indices; nil if nothing does.
func at(v any, path ...any) any {
	for _, p := range path {
		switch p := p.(type) {
		case string:
			m, ok := v.(map[string]any)
			if !ok {
				return nil
			}
			v = m[p]
		case int:
			a, ok := v.([]any)
			if !ok || p >= len(a) {
				return nil
			}
			v = a[p]
		}
	}
	return v
}

// has says whether there is a field, be it null.
func has(v any, name string) bool {
	m, _ := v.(map[string]any)
	_, ok := m[name]
	return ok
}

// json returns the body of a reply that must be 200.
func (r reply) json(t *testing.T) any {
	t.Helper()
	if r.err != nil || r.status != http.StatusOK {
		t.Fatalf("status %d, error %v, body %s", r.status, r.err, r.body)
	}
	var v any
	if err := json.Unmarshal(r.body, &v); err != nil {
		t.Fatalf("%v in %s", err, r.body)
	}
	return v
}

// events returns the JSON of a stream's events, and whether it ended with [DONE].
func (r reply) events(t *testing.T) (out []any, done bool) {
	t.Helper()
	sc := bufio.NewScanner(bytes.NewReader(r.body))
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		switch {
		case sc.Text() == "" || strings.HasPrefix(sc.Text(), "event: "):
		case !ok || done:
			t.Fatalf("line %q", sc.Text())
		case data == "[DONE]":
			done = true
		default:
			var v any
			if err := json.Unmarshal([]byte(data), &v); err != nil {
				t.Fatalf("%v in %s", err, data)
			}
			out = append(out, v)
		}
	}
	return out, done
}

func number(v any) int {
	f, ok := v.(float64)
	if !ok {
		return -1
	}
	return int(f)
}

func text0(v any) string {
	s, _ := v.(string)
	return s
}

// cached returns the cached tokens of an answer's usage.
func cached(v any) int { return number(at(v, "usage", "prompt_tokens_details", "cached_tokens")) }

func chatOf(more doc, contents ...string) doc {
	list := make([]any, len(contents))
	for i, c := range contents {
		list[i] = doc{"role": []string{"user", "assistant"}[i%2], "content": c}
	}
	d := doc{"model": "sim-8b", "messages": list}
	for k, v := range more {
		d[k] = v
	}
	return d
}

func (e *Engine) chatURL() string       { return e.URL() + "/v1/chat/completions" }
func (e *Engine) completionURL() string { return e.URL() + "/v1/completions" }

// lastRecord returns the latest record of a path, once it has ended.
func (e *Engine) lastRecord(t *testing.T, path string) Record {
	t.Helper()
	var out Record
	eventually(t, "the request has ended: "+path, func() bool {
		for _, r := range e.Journal() {
			if r.Path == path {
				out = r
			}
		}
		return out.Seq > 0 && out.Outcome != Running
	})
	return out
}
