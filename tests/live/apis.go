package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/tidwall/gjson"
)

// api is an API by which a client talks with an engine.
type api int

// The APIs.
const (
	chat api = iota
	completions
	tokenIDs // completions with token ids
	responses
	messages
)

// apis lists all of them.
var apis = []api{chat, completions, tokenIDs, responses, messages}

// String returns the API's name in reports.
func (a api) String() string {
	return [...]string{"chat", "completions", "ids", "responses", "messages"}[a]
}

func (a api) path() string {
	return [...]string{"/v1/chat/completions", "/v1/completions", "/v1/completions", "/v1/responses", "/v1/messages"}[a]
}

// spelling is how a client writes JSON.
type spelling int

// The spellings.
const (
	raw       spelling = iota // as it is, as JavaScript does
	html                      // <, > and & as escapes, as Go does
	ascii                     // all but ASCII as escapes, as Python does
	spellings                 // how many there are
)

func (s spelling) marshal(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(s == html)
	if err := enc.Encode(v); err != nil {
		panic(err) // of maps and strings
	}
	if s != ascii {
		return b.Bytes()
	}
	var out []byte
	for _, r := range b.String() {
		switch {
		case r < 0x80:
			out = append(out, byte(r))
		case r > 0xffff:
			out = fmt.Appendf(out, `\u%04x\u%04x`, 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}

// spoken is one message of a history: a question or an answer.
type spoken struct {
	role string
	text string
	ids  []uint32          // with token ids: the tokens that it adds to the prompt
	item []json.RawMessage // of the responses API: the output, as it came
}

type object = map[string]any

// request returns the body of a request with a history.
func (t *talk) request(history []spoken) []byte {
	v := object{"model": t.model, "stream": t.stream}
	limit := "max_tokens"
	switch t.api {
	case chat:
		list := append(make([]object, 0, 1+len(history)), object{"role": "system", "content": t.system})
		for _, m := range history {
			list = append(list, object{"role": m.role, "content": m.text})
		}
		v["messages"] = list
	case completions:
		v["prompt"] = transcript(t.system, history)
	case tokenIDs:
		prompt := t.head
		for _, m := range history {
			prompt = append(slices.Clip(prompt), m.ids...)
		}
		v["prompt"], v["return_token_ids"], v["ignore_eos"] = prompt, true, true
	case responses:
		limit = "max_output_tokens"
		var list []any
		for _, m := range history {
			if m.item == nil {
				list = append(list, object{"role": m.role, "content": m.text})
			}
			for _, item := range m.item {
				list = append(list, item)
			}
		}
		v["instructions"], v["input"], v["store"] = t.system, list, false
	case messages:
		list := make([]object, 0, len(history))
		for _, m := range history {
			list = append(list, object{"role": m.role, "content": []object{{"type": "text", "text": m.text}}})
		}
		v["system"], v["messages"] = t.system, list
	}
	v[limit] = t.answer
	if t.stream && t.api <= tokenIDs {
		v["stream_options"] = object{"include_usage": true}
	}
	if t.salt != "" {
		v["cache_salt"] = t.salt
	}
	return t.spelling.marshal(v)
}

// transcript returns a conversation as one text.
func transcript(system string, history []spoken) string {
	var b strings.Builder
	b.WriteString(system)
	for _, m := range history {
		b.WriteString(piece(m))
	}
	return b.String()
}

// piece returns what a message adds to a transcript.
func piece(m spoken) string {
	if m.role == "user" {
		return "\n\nUser: " + m.text + "\n\nAssistant:"
	}
	return m.text
}

// answer is what came back.
type answer struct {
	spoken
	prompt, completion, cached int // tokens; cached is -1 if the engine did not tell
}

// read reads an answer, whole or streamed.
func (t *talk) read(body []byte) (answer, error) {
	a := answer{spoken: spoken{role: "assistant"}, cached: -1}
	if !t.stream {
		return a, a.take(body)
	}
	for line := range bytes.Lines(body) {
		data, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data: "))
		if !ok || string(data) == "[DONE]" {
			continue
		}
		if err := a.take(data); err != nil {
			return a, err
		}
	}
	return a, nil
}

// take reads a whole answer or one event, of any API.
func (a *answer) take(data []byte) error {
	d := gjson.ParseBytes(data)
	if e := d.Get("error"); !gjson.ValidBytes(data) || e.Type != gjson.Null {
		return fmt.Errorf("answer is an error: %s", data)
	}
	texts := []string{"choices.#.text", "choices.#.delta.content", "choices.#.message.content", "content.#.text"}
	if d.Get("type").Str == "content_block_delta" {
		texts = []string{"delta.text"}
	}
	if whole := d.Get("response"); whole.Exists() { // of the last one
		d = whole
	}
	for _, path := range append(texts, "output.#.content.#.text|@flatten") {
		d.Get(path).ForEach(func(_, t gjson.Result) bool {
			a.text += t.Str
			return true
		})
	}
	d.Get("choices.#.token_ids|@flatten").ForEach(func(_, id gjson.Result) bool {
		a.ids = append(a.ids, uint32(id.Uint()))
		return true
	})
	for i, item := range d.Get("output").Array() {
		a.item = append(a.item[:i], json.RawMessage(item.Raw))
	}
	if u := d.Get("usage"); u.IsObject() {
		a.count(u)
	}
	return nil
}

func (a *answer) count(u gjson.Result) {
	a.prompt = int(u.Get("prompt_tokens").Int() + u.Get("input_tokens").Int())
	a.completion = int(u.Get("completion_tokens").Int() + u.Get("output_tokens").Int())
	for _, path := range []string{"prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens"} {
		if cached := u.Get(path); cached.Exists() {
			a.cached = int(cached.Int())
		}
	}
	// The messages API: parts of the prompt that input_tokens leaves out.
	if read, created := u.Get("cache_read_input_tokens"), u.Get("cache_creation_input_tokens"); read.Exists() && created.Exists() {
		a.cached = int(read.Int())
		a.prompt += int(read.Int() + created.Int())
	}
}
