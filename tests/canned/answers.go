package canned

import (
	"bytes"
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

	// of responses, embeddings and classify
	Input json.RawMessage `json:"input"`
	// of embeddings
	EncodingFormat string `json:"encoding_format"`
	Dimensions     int    `json:"dimensions"`
	// of rerank
	Documents []json.RawMessage `json:"documents"`
	// of score
	Text2 json.RawMessage `json:"text_2"`
}

// reply is what an answer is made of, in whichever shape.
type reply struct {
	id    string
	model string
	words []string
	// The name of the tool to be called; then there are no words.
	tool string
	// In tokens. What was cached and what is now is a part of the prompt.
	prompt, cached, created, completion int
	// Whether a stream of chat or completions says so at its end.
	usage bool
}

// event is one server-sent event of a streamed answer.
type event struct {
	name string // empty if it has none
	doc  any
	word bool // comes at the pace of words
}

// shape is how an API writes its answers. Those without a decode phase have no
// events.
type shape struct {
	whole  func(*reply, *call) any
	events func(*reply, *call) []event
	// done says that [DONE] ends a stream.
	done bool
	// called tells whether the tool has been called already.
	called func(*call) bool
}

// shapes are the APIs by what their paths end in, with or without /v1 before
// it. Chat and completions may have anything before it.
var shapes = map[string]shape{
	"/chat/completions":      {chatWhole, chatEvents, true, chatCalled},
	"/completions":           {textWhole, textEvents, true, nil},
	"/responses":             {responseWhole, responseEvents, false, responseCalled},
	"/messages":              {messageWhole, messageEvents, false, messageCalled},
	"/messages/count_tokens": {whole: countWhole},
	"/generate":              {generateWhole, generateEvents, true, nil},
	"/embeddings":            {whole: embeddingsWhole},
	"/rerank":                {whole: rerankWhole},
	"/score":                 {whole: scoreWhole},
	"/classify":              {whole: classifyWhole},
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
	rep := newReply(&c, sh, body, pace)
	if c.Stream && sh.events != nil {
		rep.stream(w, r, pace, f, sh.events(rep, &c), sh.done)
	} else {
		rep.whole(w, r, pace, f, sh.whole(rep, &c))
	}
}

// newReply decides what is answered.
func newReply(c *call, sh shape, body []byte, pace Pace) *reply {
	p := &reply{model: c.Model, prompt: len(body)/4 + 1, usage: c.StreamOptions.IncludeUsage}
	if p.model == "" {
		p.model = "canned"
	}
	words := Words(body, max(pace.Words, 1))
	p.id = words[0]
	p.cached, p.created = p.prompt/2, p.prompt/8
	switch {
	case sh.events == nil:
		return p
	case sh.called != nil && len(c.Tools) > 0 && !sh.called(c):
		if p.tool = c.Tools[0].Name; p.tool == "" {
			p.tool = c.Tools[0].Function.Name
		}
	default:
		p.words = words
	}
	p.completion = max(len(p.words), 8)
	return p
}

// text is the answer's words as one.
func (p *reply) text() string { return strings.Join(p.words, " ") }

// pieces are the words as a stream brings them: with the space before each.
func (p *reply) pieces() []string {
	out := make([]string, len(p.words))
	for i, word := range p.words {
		if i > 0 {
			word = " " + word
		}
		out[i] = word
	}
	return out
}

// toolArguments are the arguments of each tool call; toolPieces are they as a
// stream brings them.
const toolArguments = `{"city": "Reykjavík"}`

var toolPieces = []string{toolArguments[:5], toolArguments[5:]}

// whole answers in one piece.
func (p *reply) whole(w http.ResponseWriter, r *http.Request, pace Pace, f Fault, doc any) {
	if !pause(r.Context(), pace.FirstToken+time.Duration(len(p.words))*pace.PerWord) {
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
func (p *reply) stream(w http.ResponseWriter, r *http.Request, pace Pace, f Fault, events []event, done bool) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	ctl := http.NewResponseController(w)
	if ctl.Flush() != nil || !pause(r.Context(), pace.FirstToken) {
		return
	}
	words := 0
	for _, e := range events {
		if e.word {
			if f.Kind == DieMidStream && words == f.Words {
				CloseConn(w, false)
				return
			}
			if words > 0 && !pause(r.Context(), pace.PerWord) {
				return
			}
			words++
		}
		if e.name != "" {
			fmt.Fprintf(w, "event: %s\n", e.name)
		}
		data, _ := json.Marshal(e.doc)
		if _, err := fmt.Fprintf(w, "data: %s\n\n", data); err != nil || ctl.Flush() != nil {
			return
		}
	}
	if done {
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
