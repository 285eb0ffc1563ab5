package tests

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// message is one message of a chat.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chat is a chat completion request.
type chat struct {
	Model         string          `json:"model"`
	Messages      []message       `json:"messages"`
	Stream        bool            `json:"stream,omitempty"`
	MaxTokens     int             `json:"max_tokens,omitempty"`
	StreamOptions json.RawMessage `json:"stream_options,omitempty"`
	Nvext         json.RawMessage `json:"nvext,omitempty"`
}

// ask returns a chat of one message.
func ask(content string) chat {
	return chat{Model: "canned", Messages: []message{{"user", content}}}
}

func (c chat) streamed() chat {
	c.Stream = true
	return c
}

func (c chat) body() []byte {
	out, err := json.Marshal(c)
	if err != nil {
		panic(err)
	}
	return out
}

// answer is what a client got for a request.
type answer struct {
	status int // 0 when not even a header came
	header http.Header
	body   []byte // as it came
	text   string // the words of it
	whole  bool   // it ended as it should: the JSON's last byte, or [DONE]
	err    error
}

// engine returns the name of the engine that answered.
func (a answer) engine() string { return a.header.Get(canned.EngineHeader) }

// ok says whether the request was served.
func (a answer) ok() bool { return a.status == http.StatusOK && a.whole && a.err == nil }

// chat sends a chat and reads its whole answer.
func (s *server) chat(ctx context.Context, c chat, header ...string) answer {
	return s.post(ctx, "/v1/chat/completions", c.body(), header...)
}

// post sends a body, with header names and values in turn, and reads the whole
// answer.
func (s *server) post(ctx context.Context, path string, body []byte, header ...string) answer {
	return s.request(ctx, http.MethodPost, path, bytes.NewReader(body), header...)
}

// request is post for any method.
func (s *server) request(ctx context.Context, method, path string, body io.Reader, header ...string) answer {
	req, err := http.NewRequestWithContext(ctx, method, s.url+path, body)
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return s.do(req)
}

func (s *server) do(req *http.Request) answer {
	resp, err := s.client.Do(req)
	if err != nil {
		return answer{err: err}
	}
	// net/http forgets the context of a connection that changes its protocol.
	defer context.AfterFunc(req.Context(), func() { resp.Body.Close() })()
	return read(resp)
}

// read reads a whole answer.
func read(resp *http.Response) answer {
	defer resp.Body.Close()
	a := answer{status: resp.StatusCode, header: resp.Header}
	a.body, a.err = io.ReadAll(resp.Body)
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		a.readStream()
	} else {
		a.readJSON()
	}
	return a
}

// choices is the part of an answer that the tests look at.
type choices struct {
	Choices []struct {
		Text    string  `json:"text"`
		Delta   message `json:"delta"`
		Message message `json:"message"`
	} `json:"choices"`
}

func (a *answer) readJSON() {
	var doc choices
	a.whole = a.err == nil && json.Unmarshal(a.body, &doc) == nil
	for _, c := range doc.Choices {
		a.text += c.Text + c.Message.Content
	}
}

func (a *answer) readStream() {
	lines := bufio.NewScanner(bytes.NewReader(a.body))
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			a.whole = a.err == nil
			return
		}
		var doc choices
		if json.Unmarshal([]byte(data), &doc) != nil {
			return
		}
		for _, c := range doc.Choices {
			a.text += c.Text + c.Delta.Content
		}
	}
}

// mustChat sends a chat that has to be served.
func (s *server) mustChat(t testing.TB, c chat, header ...string) answer {
	t.Helper()
	a := s.chat(t.Context(), c, header...)
	if !a.ok() {
		t.Fatalf("status %d, error %v, body %.300q", a.status, a.err, a.body)
	}
	return a
}
