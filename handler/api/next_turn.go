package api

import (
	"bytes"
	"encoding/json"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// kept is the text of an answer, for the turn that follows it.
type kept struct {
	most int    // bytes; 0 if nothing is to be kept
	raw  []byte // what stands between the quotes of JSON strings, put together
	lost bool   // there was something else than text, or too much of it
}

func (k *kept) add(raw []byte) {
	switch {
	case k.lost:
	case len(k.raw)+len(raw) > k.most:
		k.lost, k.raw = true, nil
	default:
		k.raw = append(k.raw, raw...)
	}
}

// unlike takes in that the answer has something that does not come back in the
// same form, which is no reasoning.
func (a *Answer) unlike() { a.steady, a.kept.lost = false, true }

// KeepText lets the answer keep its text for Text, as long as that has at most
// so many bytes of JSON. It is for the time before the first Write.
func (a *Answer) KeepText(most int) { a.kept.most = most }

// Text returns the answer's text without reasoning, as it stands between the
// quotes of a JSON string: what the client sends back as the assistant's message
// of its next turn. It is nil if it was not kept, there is none, or the answer
// is unfinished, failed, or holds something else that comes back, such as a tool
// call. Ask after Finish.
func (a *Answer) Text() []byte {
	if a.kept.lost || a.failed || a.finished == 0 && !a.done {
		return nil
	}
	raw := withoutThinking(a.kept.raw)
	if len(raw) == 0 || !json.Valid(slices.Concat([]byte{'"'}, raw, []byte{'"'})) {
		return nil
	}
	return raw
}

// withoutThinking cuts off the reasoning that an engine without a parser for it
// leaves in front of the text, as templates do with the turns before. It returns
// nothing of a text that is reasoning to its end.
func withoutThinking(raw []byte) []byte {
	if !bytes.Contains(raw, []byte("think")) && bytes.IndexByte(raw, '\\') < 0 {
		return raw
	}
	said := []byte(rawjson.Text(raw))
	i := bytes.LastIndex(said, []byte(thinkShut))
	switch {
	case i >= 0:
		said = bytes.TrimLeft(said[i+len(thinkShut):], " \t\r\n")
	case bytes.HasPrefix(bytes.TrimLeft(said, " \t\r\n"), []byte(thinkOpen)):
		return nil
	default:
		return raw
	}
	out := make([]byte, 0, len(said))
	for k := range said {
		out = spell(out, said[k:k+1])
	}
	return out
}

// Continues tells whether a NextTurn can be made of a request and its answer: it
// is a conversation whose next turn begins with both.
func (r *Request) Continues() bool {
	switch r.API.(type) {
	case chat, messages:
		return r.steady
	}
	return false
}

// BlocksWith returns the blocks of the prompt and an answer's Text together, and
// how far both go on behind the last of these, in blocks. Use it where Continues
// says so.
func (r *Request) BlocksWith(answer []byte) (blocks []uint64, past float32) {
	a := Answer{req: r, hash: r.rest.follow()}
	r.API.begin(&a)
	a.hash.AddString(answer)
	return slices.Concat(r.Blocks, a.hash.blocks), a.hash.past()
}

// PromptText returns a prompt that the client gave as one text, as it stands in
// the body: a JSON string. It is nil for a conversation, which the engine makes a
// prompt of, and for a batch. The body must be the one that was parsed.
func (r *Request) PromptText(body []byte) []byte {
	if r.Kind != Text || r.given.End == 0 || len(body) != r.size {
		return nil
	}
	return r.given.Of(body)
}

// next is the message behind the answer. Templates write the last turn in another
// way than those before (with its reasoning, or with the tools before it), so
// that something must follow.
const next = `{"role":"user","content":"."}`

// NextTurn appends to dst a body that lets an engine compute what the next turn
// of a conversation begins with: that of the turn before with the answer's Text
// as one more message, and asking for one token, in one piece. What only concerns
// the turn before is left out: the nvext, how the answer is to be, its id and its
// priority. The other members stay as they are. It is not ok if the body is
// malformed or has no messages, or if the engine keeps state for it: a session,
// or a transfer of KV blocks.
func NextTurn(dst, body, answer []byte) (out []byte, ok bool) {
	i := rawjson.SkipSpace(body, 0)
	if i >= len(body) || body[i] != '{' {
		return dst, false
	}
	out = append(dst, '{')
	c := rawjson.Enter(body, i)
	for c.Next() {
		at, key := c.KeyAt, string(c.Key())
		v := c.Value()
		switch {
		case c.Err != nil:
			return dst, false
		case ofTheTurn(key):
			continue
		case key == "messages":
			if ok = v.First(body) == '[' && v.HasContent(body); ok {
				out = append(out, body[at:v.End-1]...)
				out = append(out, `,{"role":"assistant","content":"`...)
				out = append(out, answer...)
				out = append(out, `"},`+next+`],`...)
			}
			continue
		case ofTheEngine(key) && !v.IsNull(body):
			return dst, false
		}
		out = append(out, body[at:v.End]...)
		out = append(out, ',')
	}
	if c.Err != nil || rawjson.SkipSpace(body, c.At) != len(body) || !ok {
		return dst, false
	}
	return append(out, `"max_tokens":1,"stream":false}`...), true
}

// ofTheEngine tells whether a member of a body names state that the engine keeps
// or is to move.
func ofTheEngine(key string) bool {
	return key == "session_params" || key == "kv_transfer_params" || key == "bootstrap_room"
}

// ofTheTurn tells whether a member of a body concerns one turn's answer only.
func ofTheTurn(key string) bool {
	switch key {
	case "nvext", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
		"logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "thinking", "thinking_token_budget",
		"store", "request_id", "rid", "priority":
		return true
	}
	return false
}
