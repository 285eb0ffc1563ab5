package tests

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
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
	resp, err := s.open(ctx, method, path, body, header...)
	if err != nil {
		return answer{err: err}
	}
	// net/http forgets the context of a connection that changes its protocol.
	defer context.AfterFunc(ctx, func() { resp.Body.Close() })()
	return read(resp)
}

// open makes a request and returns its answer, of which only the header has come.
func (s *server) open(ctx context.Context, method, path string, body io.Reader, header ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, s.url+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return s.client.Do(req)
}

// mustOpen opens the answer to a chat's body. It is closed with the test.
func (s *server) mustOpen(ctx context.Context, t testing.TB, path string, body []byte, header ...string) *http.Response {
	t.Helper()
	resp, err := s.open(ctx, http.MethodPost, path, bytes.NewReader(body), header...)
	noError(t, err)
	t.Cleanup(func() { resp.Body.Close() })
	return resp
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
	return s.mustPost(t, c.body(), header...)
}

// mustPost is mustChat with a body.
func (s *server) mustPost(t testing.TB, body []byte, header ...string) answer {
	t.Helper()
	a := s.post(t.Context(), atChat, body, header...)
	if !a.ok() {
		t.Fatalf("status %d, error %v, body %.300q", a.status, a.err, a.body)
	}
	return a
}

// atOnce has n clients do something at the same time, and waits for them.
func atOnce(n int, client func(i int)) {
	var clients sync.WaitGroup
	for i := range n {
		clients.Go(func() { client(i) })
	}
	clients.Wait()
}

// conversation is one chat that grows by a question and its answer each turn.
type conversation struct {
	chat    chat
	engines []string // who answered each turn
	rng     *rand.Rand
}

// prose returns n to m bytes of words.
func prose(rng *rand.Rand, n, m int) string {
	size := n + rng.IntN(m-n+1)
	var b strings.Builder
	for b.Len() < size {
		fmt.Fprintf(&b, "%x ", rng.Uint64N(1<<(4*(1+rng.Uint64N(9)))))
	}
	return b.String()[:size]
}

// newConversations returns n conversations. The seed determines their text.
func newConversations(n int, seed uint64) []*conversation {
	out := make([]*conversation, n)
	for i := range out {
		out[i] = &conversation{chat: chat{Model: "canned"}, rng: rand.New(rand.NewPCG(seed, uint64(i)))}
	}
	return out
}

// converse takes all conversations through their turns in a dialect, with 8 clients at once. Each
// client takes the conversation that has waited longest and makes one turn.
func (s *server) converse(t *testing.T, convs []*conversation, turns int, stream bool, d dialect) {
	t.Helper()
	queue := make(chan *conversation, len(convs))
	for _, c := range convs {
		queue <- c
	}
	var open sync.WaitGroup
	open.Add(len(convs))
	go func() {
		open.Wait()
		close(queue)
	}()
	atOnce(8, func(int) {
		for c := range queue {
			c.chat.Messages = append(c.chat.Messages, message{"user", prose(c.rng, 100, 600)})
			a := s.post(t.Context(), d.path, mustJSON(d.body(c.chat.Messages, stream)))
			text, whole := d.said(a, stream)
			if !whole || d.plain != "" && text == "" {
				t.Errorf("%s, turn %d: status %d, error %v, answer %.300q", d.name, len(c.engines)+1, a.status, a.err, a.body)
				open.Done()
				continue
			}
			c.engines = append(c.engines, a.engine())
			if d.plain != "" {
				c.chat.Messages = append(c.chat.Messages, message{"assistant", text})
			}
			if len(c.engines) == turns {
				open.Done()
			} else {
				queue <- c
			}
		}
	})
}

// kept returns the share of turns that reached the engine of the turn before.
func kept(convs []*conversation) float64 {
	same, all := 0, 0
	for _, c := range convs {
		for i := 1; i < len(c.engines); i++ {
			all++
			if c.engines[i] == c.engines[i-1] {
				same++
			}
		}
	}
	return float64(same) / float64(max(all, 1))
}

// spread returns how many requests each engine had, and the highest count as a multiple of
// the mean.
func spread(engines []*canned.Engine) ([]int, float64) {
	counts, total, most := make([]int, len(engines)), 0, 0
	for i, e := range engines {
		counts[i] = e.Requests()
		total += counts[i]
		most = max(most, counts[i])
	}
	return counts, float64(most) * float64(len(engines)) / float64(max(total, 1))
}

// tokens is the approximate length of messages in the simulated engines' tokens.
func tokens(messages []message) (n int) {
	for _, m := range messages {
		n += len(m.Content) / 4
	}
	return n
}
