package canned

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"
)

// call is what the engine understands of a request.
type call struct {
	Model         string `json:"model"`
	Stream        bool   `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	Messages []struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	} `json:"messages"`
	Tools []struct {
		Name     string `json:"name"`
		Function struct {
			Name string `json:"name"`
		} `json:"function"`
	} `json:"tools"`

	// of responses and embeddings
	Input json.RawMessage `json:"input"`
	// of embeddings
	EncodingFormat string `json:"encoding_format"`
	Dimensions     int    `json:"dimensions"`
}

// Answer is what an answer is made of, in whichever API's shape. Times are in seconds, counts in tokens.
type Answer struct {
	ID, Model string
	Begun     int64
	// Pieces are the text, as a stream brings it.
	Pieces []string
	// Reasoning is how many of the first pieces are reasoning, in chats.
	Reasoning int
	// Tool is the name of the tool to be called; then there is no text.
	Tool string
	// Reason is why the answer ends: stop, length or tool_calls.
	Reason string

	// What was cached and what is now is a part of the prompt.
	Prompt, Cached, Created, Completion int
	// Usage is whether a stream of chat or completions has the usage at its end.
	Usage bool

	// Engine is what only a simulated engine knows; nil for others.
	Engine *OfEngine

	tools []any // of the request, as the responses API repeats them
}

// OfEngine is what a simulated engine has in its answers besides.
type OfEngine struct {
	// The ids of the prompt's and the answer's tokens, one for each piece.
	PromptIDs, IDs []uint32
	// ReturnIDs is whether chat and completions have them.
	ReturnIDs bool
	// Further members: InWhole of an answer that is not streamed, InChoice of its choice in chat and
	// completions.
	InWhole, InChoice map[string]any
	// Timings are llama.cpp's, in these answers and in the last token's event; nil for others.
	Timings any
}

// Event is one server-sent event of a streamed answer.
type Event struct {
	Name string // empty if it has none
	Doc  any
	Word bool // it has one of the pieces
}

// Append appends the event as it is sent.
func (e *Event) Append(b []byte) []byte {
	if e.Name != "" {
		b = fmt.Appendf(b, "event: %s\n", e.Name)
	}
	data, _ := json.Marshal(e.Doc)
	return fmt.Appendf(b, "data: %s\n\n", data)
}

// API is how an API writes its answers.
type API struct {
	Whole  func(*Answer) any
	Events func(*Answer) []Event
	// Done says that [DONE] ends a stream.
	Done bool
}

// The APIs with a decode phase. TokensIn is vLLM's /inference/v1/generate.
var (
	Chat        = API{chatWhole, chatEvents, true}
	Completions = API{textWhole, textEvents, true}
	Responses   = API{responseWhole, responseEvents, false}
	Messages    = API{messageWhole, messageEvents, false}
	Generate    = API{generateWhole, generateEvents, true}
	TokensIn    = API{tokensWhole, tokensEvents, true}
)

// shape is an API, or answers without a decode phase.
type shape struct {
	API
	scores func(*Answer, *call) any
	// called tells whether the tool has been called already.
	called func(*call) bool
}

// shapes are the APIs by what their paths end in, with or without /v1 before
// it. Chat and completions may have anything before it.
var shapes = map[string]shape{
	"/chat/completions":      {API: Chat, called: chatCalled},
	"/completions":           {API: Completions},
	"/responses":             {API: Responses, called: responseCalled},
	"/messages":              {API: Messages, called: messageCalled},
	"/generate":              {API: Generate},
	"/messages/count_tokens": {scores: countWhole},
	"/embeddings":            {scores: embeddingsWhole},
	"/rerank":                {scores: scoresWhole},
	"/score":                 {scores: scoresWhole},
	"/classify":              {scores: scoresWhole},
}

func shapeOf(path string) (shape, bool) {
	for _, open := range []string{"/chat/completions", "/completions"} {
		if strings.HasSuffix(path, open) {
			return shapes[open], true
		}
	}
	s, ok := shapes[strings.TrimPrefix(path, "/v1")]
	return s, ok
}

// Words returns the n words that an engine answers to a request with this body:
// all different, and other ones for other bodies. What a stream is asked to
// report makes no difference.
func Words(body []byte, n int) []string {
	rng := seeded(unasked(body))
	syllables := []string{"ba", "ke", "mi", "no", "ru", "sel", "tor", "vin", "lam", "dex", "po", "ga", "hir", "zu", "fen", "cor"}
	words := make([]string, 0, n)
	seen := make(map[string]bool, n)
	for len(words) < n {
		var b strings.Builder
		for range 2 + rng.IntN(3) {
			b.WriteString(syllables[rng.IntN(len(syllables))])
		}
		if w := b.String(); !seen[w] {
			seen[w] = true
			words = append(words, w)
		}
	}
	return words
}

// seeded returns randomness that follows from data.
func seeded(data []byte) *rand.Rand {
	sum := sha256.Sum256(data)
	return rand.New(rand.NewPCG(binary.LittleEndian.Uint64(sum[:]), binary.LittleEndian.Uint64(sum[8:]))) //nolint:gosec // not a secret
}

// unasked returns a body without its stream_options.
func unasked(body []byte) []byte {
	var doc map[string]json.RawMessage
	if json.Unmarshal(body, &doc) != nil {
		return body
	}
	delete(doc, "stream_options")
	if out, err := json.Marshal(doc); err == nil {
		return out
	}
	return body
}

// answer answers as an engine that works does.
func (e *Engine) answer(w http.ResponseWriter, r *http.Request, body []byte, pace Pace, f Fault) {
	path := r.URL.Path
	sh, known := shapeOf(path)
	switch {
	case path == "/metrics", path == "/tokenize", path == "/load":
		writeError(w, http.StatusNotFound, "not found")
		return
	case strings.HasSuffix(path, "/models"):
		writeJSON(w, map[string]any{"object": "list", "data": []any{map[string]any{"id": "canned", "object": "model", "created": 0, "owned_by": "canned"}}})
		return
	case r.Method != http.MethodPost, !known:
		writeJSON(w, map[string]any{"engine": e.name, "method": r.Method, "uri": r.RequestURI, "bytes": len(body)})
		return
	}

	var c call
	if r.Header.Get("Content-Encoding") == "" {
		if err := json.Unmarshal(body, &c); err != nil {
			writeError(w, http.StatusBadRequest, "invalid JSON: "+err.Error())
			return
		}
	}
	p := newAnswer(&c, sh, body, pace)
	switch {
	case sh.scores != nil:
		p.whole(w, r, pace, f, sh.scores(p, &c))
	case c.Stream:
		p.stream(w, r, pace, f, sh.API)
	default:
		p.whole(w, r, pace, f, sh.Whole(p))
	}
}

// newAnswer decides what is answered.
func newAnswer(c *call, sh shape, body []byte, pace Pace) *Answer {
	words := Words(body, max(pace.Words, 1))
	p := &Answer{ID: "cmpl-" + words[0], Model: cmp.Or(c.Model, "canned"), Begun: 1700000000, Reason: "stop", Prompt: len(body)/4 + 1, Usage: c.StreamOptions.IncludeUsage}
	p.Cached, p.Created = p.Prompt/2, p.Prompt/8
	for _, t := range c.Tools {
		p.tools = append(p.tools, map[string]any{"type": "function", "name": t.Name, "parameters": map[string]any{}, "strict": false})
	}
	switch {
	case sh.scores != nil:
		return p
	case sh.called != nil && len(c.Tools) > 0 && !sh.called(c):
		p.Tool, p.Reason = cmp.Or(c.Tools[0].Name, c.Tools[0].Function.Name), "tool_calls"
	default:
		for i, word := range words {
			if i > 0 {
				word = " " + word // as a stream brings it
			}
			p.Pieces = append(p.Pieces, word)
		}
	}
	p.Completion = max(len(p.Pieces), 8)
	return p
}

// text is the answer's text.
func (p *Answer) text() string { return strings.Join(p.Pieces, "") }

// toolArguments are the arguments of each tool call; toolPieces are they as a
// stream brings them.
const toolArguments = `{"city": "Reykjavík"}`

var toolPieces = []string{toolArguments[:5], toolArguments[5:]}

// whole answers in one piece.
func (p *Answer) whole(w http.ResponseWriter, r *http.Request, pace Pace, f Fault, doc any) {
	if !pause(r.Context(), pace.FirstToken+time.Duration(len(p.Pieces))*pace.PerWord) {
		return
	}
	if f.Kind != DieMidStream {
		writeJSON(w, doc)
		return
	}
	out, _ := json.Marshal(doc)
	w.Header().Set("Content-Type", "application/json")
	w.Write(out[:len(out)/2]) //nolint:errcheck // the client may leave
	http.NewResponseController(w).Flush()
	CloseConn(w, false)
}

// stream answers with server-sent events. The header goes out at once, the
// first event when the first token is there.
func (p *Answer) stream(w http.ResponseWriter, r *http.Request, pace Pace, f Fault, api API) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	ctl := http.NewResponseController(w)
	if ctl.Flush() != nil || !pause(r.Context(), pace.FirstToken) {
		return
	}
	words := 0
	for _, e := range api.Events(p) {
		if e.Word {
			if f.Kind == DieMidStream && words == f.Words {
				CloseConn(w, false)
				return
			}
			if words > 0 && !pause(r.Context(), pace.PerWord) {
				return
			}
			words++
		}
		if _, err := w.Write(e.Append(nil)); err != nil || ctl.Flush() != nil {
			return
		}
	}
	if api.Done {
		io.WriteString(w, "data: [DONE]\n\n") //nolint:errcheck // the client may leave
	}
}

func writeJSON(w http.ResponseWriter, doc any) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.Encode(doc) //nolint:errcheck // of maps and strings
	w.Header().Set("Content-Type", "application/json")
	w.Write(b.Bytes()) //nolint:errcheck // the client may leave
}

// writeError answers with an error as vLLM shapes it.
func writeError(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(map[string]any{ //nolint:errcheck // the client may leave
		"error": map[string]any{"message": message, "type": http.StatusText(status), "param": nil, "code": status},
	})
}
