package api

import (
	"bytes"
	"encoding/json"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Splicer makes the stream of another engine go on where the client's has broken off. It gives it
// the first one's id and the usage of both, and takes out its beginning and text that comes twice.
type Splicer struct {
	answer         *Answer // what the client has
	prompt, cached int64   // of the first part; -1 is unknown
	tokens         int64   // of the first part
	ids            bool    // this part goes on with the ids of the first one
	duplicate      string  // text that the client has and the engine writes again
	events, blocks int     // that the client had of the first part
	began          int     // events of a beginning that were left out
}

// Event returns the data of an event as the client gets it; nil if the client gets nothing of
// it. It is not ok if the event does not belong to a stream that goes on.
func (s *Splicer) Event(data []byte) (out []byte, ok bool) {
	if s.events == 0 || string(bytes.TrimSpace(data)) == "[DONE]" {
		return data, true
	}
	if !json.Valid(data) {
		return nil, false
	}
	i := rawjson.SkipSpace(data, 0)
	e := rawjson.EditAt(data, i, maxMembers)
	if data[i] != '{' || e == nil {
		return nil, false
	}
	if isError(e) {
		return data, true
	}
	var keep bool
	switch s.answer.req.API.(type) {
	case chat, completions:
		keep, ok = s.chunk(e)
	case messages:
		keep, ok = s.message(e)
	case responses:
		keep, ok = s.response(e), true
	default:
		return nil, false
	}
	if !keep || !ok {
		return nil, ok
	}
	return e.Apply(), true
}

func (s *Splicer) chunk(e *rawjson.Editor) (keep, ok bool) {
	list := e.At("choices")
	if list.End == 0 {
		return false, false
	}
	s.identify(e, s.answer.track.first)
	if e.IsSet("usage") {
		s.usage(e, "prompt_tokens", "completion_tokens")
	}
	says, choices := false, 0
	for v := range list.Elements(e.Body) {
		choices++
		if v.First(e.Body) != '{' {
			return false, false
		}
		in := e.Within(v.Start)
		if in == nil {
			return false, false
		}
		says = s.choice(in) || says
	}
	// a chunk without choices has usage, or llama.cpp's timings
	return says || choices == 0, true
}

// choice edits a choice, and returns whether it says anything to the client.
func (s *Splicer) choice(e *rawjson.Editor) (says bool) {
	text, name := e, "text"
	if e.At("delta").End > 0 {
		text, _ = e.Object("delta")
		name = "content"
	}
	if text == nil {
		return true
	}
	text.Cut("role")
	says = s.text(text, name)
	for _, other := range [...]string{"reasoning", "reasoning_content", "tool_calls", "function_call", "refusal"} {
		says = says || text.At(other).HasContent(e.Body)
	}
	// the ids are for the router's reader
	return says || e.At("token_ids").HasContent(e.Body) || e.At("finish_reason").HasContent(e.Body)
}

// text edits a member that is a piece of the answer's text. It returns whether the client gets any
// of it.
func (s *Splicer) text(e *rawjson.Editor, name string) bool {
	raw, _ := e.At(name).Str(e.Body)
	if len(raw) == 0 {
		return false
	}
	if s.duplicate == "" {
		return true
	}
	text := rawjson.Text(raw)
	n := 0
	for n < min(len(text), len(s.duplicate)) && text[n] == s.duplicate[n] {
		n++
	}
	if s.duplicate = s.duplicate[n:]; n < len(text) {
		s.duplicate = "" // it writes something else, or all of it has come
	}
	e.Set(name, rawjson.AppendString(nil, text[n:]))
	return n < len(text)
}

func (s *Splicer) identify(e *rawjson.Editor, first []byte) {
	for _, name := range identity {
		if v := rawjson.Document(first).Get(first, name); v.Len() > 0 && e.At(name).End > 0 {
			e.Set(name, v.Of(first))
		}
	}
}

// usage edits the counts in a member usage. The prompt's and the cached tokens are those of the
// first part. The answer's are those of both.
func (s *Splicer) usage(e *rawjson.Editor, prompt, completion string) {
	if s.tokens == 0 {
		return
	}
	u, ok := e.Object("usage")
	if !ok {
		return
	}
	set := func(in *rawjson.Editor, name string, n int64) {
		if in.At(name).End > 0 {
			in.Set(name, strconv.AppendInt(nil, max(n, 0), 10))
		}
	}
	p, _ := integer(u.Value(prompt))
	c, _ := integer(u.Value(completion))
	if p -= s.tokens; s.prompt >= 0 {
		p = s.prompt
	}
	c += s.tokens
	set(u, prompt, p)
	set(u, completion, c)
	set(u, "total_tokens", p+c)
	if u.IsSet("prompt_tokens_details") {
		d, ok := u.Object("prompt_tokens_details")
		if n, known := integer(d.Value("cached_tokens")); ok && known {
			if n = min(n, p); s.cached >= 0 {
				n = s.cached
			}
			set(d, "cached_tokens", n)
		}
	}
}

// isError returns whether an event ends its stream with an error, in any API.
func isError(e *rawjson.Editor) bool {
	kind := string(e.Value("type"))
	return e.IsSet("error") || kind == `"error"` || kind == `"response.failed"` || string(e.Value("object")) == `"error"`
}

func (s *Splicer) message(e *rawjson.Editor) (keep, ok bool) {
	switch e.At("type").Text(e.Body) {
	case "message_start":
		return false, true
	case "content_block_start":
		block := e.At("content_block").Get(e.Body, "type").Text(e.Body)
		if s.blocks == 0 {
			return true, true
		}
		s.blocks--
		return false, block == s.answer.track.block
	case "content_block_delta":
		delta, ok := e.Object("delta")
		if ok && string(delta.Value("type")) == `"text_delta"` {
			return s.text(delta, "text"), true
		}
		return true, ok
	case "message_delta":
		if e.IsSet("usage") {
			s.usage(e, "", "output_tokens") // the first event had the prompt's
		}
	}
	return true, true
}

// response drops the events that tell of a response's life if the client has had them. A move
// comes before any other event, and the events' numbers go on.
func (s *Splicer) response(e *rawjson.Editor) (keep bool) {
	switch e.At("type").Text(e.Body) {
	case "response.created", "response.queued", "response.in_progress": // before anything is computed
		if s.began < s.events {
			s.began++
			return false
		}
	}
	return true
}
