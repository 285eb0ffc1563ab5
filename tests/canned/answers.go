package canned

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
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
		Role string `json:"role"`
	} `json:"messages"`
	Tools []struct {
		Function struct {
			Name string `json:"name"`
		} `json:"function"`
	} `json:"tools"`
}

// reply is one answer as it is made.
type reply struct {
	chat  bool
	id    string
	model string
	words []string
	// The name of the tool to be called; then there are no words.
	tool  string
	usage map[string]any
}

// Words returns the n words that an engine answers to a request with this body:
// all different, and other ones for other bodies.
func Words(body []byte, n int) []string {
	sum := sha256.Sum256(body)
	rng := rand.New(rand.NewPCG(binary.LittleEndian.Uint64(sum[:]), binary.LittleEndian.Uint64(sum[8:]))) //nolint:gosec // not a secret
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

// answer answers as an engine that works does.
func (e *Engine) answer(w http.ResponseWriter, r *http.Request, body []byte, pace Pace, f Fault) {
	path := r.URL.Path
	chat := strings.HasSuffix(path, "/chat/completions")
	switch {
	case path == "/metrics", path == "/tokenize", path == "/load":
		writeError(w, http.StatusNotFound, "not found")
		return
	case strings.HasSuffix(path, "/models"):
		writeJSON(w, map[string]any{"object": "list", "data": []any{map[string]any{"id": "canned", "object": "model", "created": 0, "owned_by": "canned"}}})
		return
	case r.Method != http.MethodPost, !chat && !strings.HasSuffix(path, "/completions"):
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
	if c.Model == "" {
		c.Model = "canned"
	}
	rep := reply{chat: chat, id: "cmpl-" + Words(body, 1)[0], model: c.Model}
	if n := len(c.Messages); chat && len(c.Tools) > 0 && n > 0 && c.Messages[n-1].Role != "tool" {
		rep.tool = c.Tools[0].Function.Name
	} else {
		rep.words = Words(body, pace.Words)
	}
	prompt, completion := len(body)/4+1, max(len(rep.words), 8)
	rep.usage = map[string]any{"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
	if c.Stream {
		rep.stream(w, r, pace, f, c.StreamOptions.IncludeUsage)
	} else {
		rep.whole(w, r, pace, f)
	}
}

// whole answers in one piece.
func (p *reply) whole(w http.ResponseWriter, r *http.Request, pace Pace, f Fault) {
	if !pause(r.Context(), pace.FirstToken+time.Duration(len(p.words))*pace.PerWord) {
		return
	}
	choice := map[string]any{"index": 0, "logprobs": nil, "finish_reason": "stop"}
	switch {
	case p.tool != "":
		choice["finish_reason"] = "tool_calls"
		choice["message"] = map[string]any{"role": "assistant", "content": nil, "tool_calls": []any{p.toolCall(toolArguments)}}
	case p.chat:
		choice["message"] = map[string]any{"role": "assistant", "content": strings.Join(p.words, " ")}
	default:
		choice["text"] = strings.Join(p.words, " ")
	}
	doc := p.envelope("chat.completion", "text_completion", []any{choice})
	doc["usage"] = p.usage
	if f.Kind != DieMidStream {
		writeJSON(w, doc)
		return
	}
	out, _ := json.Marshal(doc)
	w.Header().Set("Content-Type", "application/json")
	w.Write(out[:len(out)/2]) //nolint:errcheck // the client may leave
	http.NewResponseController(w).Flush()
	hangUp(w, false)
}

// stream answers with server-sent events: the role, the words or the tool call
// one by one, the reason of the end, the usage if asked for, and [DONE]. The
// header goes out at once.
func (p *reply) stream(w http.ResponseWriter, r *http.Request, pace Pace, f Fault, usage bool) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	ctl := http.NewResponseController(w)
	send := func(choices []any, usage map[string]any) bool {
		doc := p.envelope("chat.completion.chunk", "text_completion", choices)
		if usage != nil {
			doc["usage"] = usage
		}
		data, _ := json.Marshal(doc)
		_, err := w.Write(append(append([]byte("data: "), data...), "\n\n"...))
		return err == nil && ctl.Flush() == nil
	}
	if ctl.Flush() != nil || !pause(r.Context(), pace.FirstToken) {
		return
	}
	if p.chat && !send([]any{p.delta(map[string]any{"role": "assistant", "content": ""}, nil)}, nil) {
		return
	}
	for i, d := range p.deltas() {
		if f.Kind == DieMidStream && i == f.Words {
			hangUp(w, false)
			return
		}
		if i > 0 && !pause(r.Context(), pace.PerWord) || !send([]any{d}, nil) {
			return
		}
	}
	reason := "stop"
	if p.tool != "" {
		reason = "tool_calls"
	}
	if !send([]any{p.delta(map[string]any{}, reason)}, nil) || usage && !send([]any{}, p.usage) {
		return
	}
	io.WriteString(w, "data: [DONE]\n\n") //nolint:errcheck // the client may leave
}

// toolArguments are the arguments of each tool call.
const toolArguments = `{"city": "Reykjavík"}`

func (p *reply) toolCall(arguments string) map[string]any {
	return map[string]any{
		"id": "call_" + p.id, "type": "function",
		"function": map[string]any{"name": p.tool, "arguments": arguments},
	}
}

// deltas returns the choices of a stream's content chunks.
func (p *reply) deltas() []any {
	var out []any
	for i, word := range p.words {
		if i > 0 {
			word = " " + word
		}
		out = append(out, p.delta(map[string]any{"content": word}, nil))
	}
	if p.tool == "" {
		return out
	}
	first := p.toolCall("")
	first["index"] = 0
	out = append(out, p.delta(map[string]any{"tool_calls": []any{first}}, nil))
	for _, part := range []string{toolArguments[:5], toolArguments[5:]} {
		piece := map[string]any{"index": 0, "function": map[string]any{"arguments": part}}
		out = append(out, p.delta(map[string]any{"tool_calls": []any{piece}}, nil))
	}
	return out
}

// delta returns one choice of a stream's chunk, in the shape of the API.
func (p *reply) delta(delta map[string]any, reason any) map[string]any {
	if p.chat {
		return map[string]any{"index": 0, "delta": delta, "logprobs": nil, "finish_reason": reason}
	}
	text, _ := delta["content"].(string)
	return map[string]any{"index": 0, "text": text, "logprobs": nil, "finish_reason": reason}
}

func (p *reply) envelope(chat, text string, choices []any) map[string]any {
	object := text
	if p.chat {
		object = chat
	}
	return map[string]any{"id": p.id, "object": object, "created": 1700000000, "model": p.model, "choices": choices}
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
