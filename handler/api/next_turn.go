package api

import (
	"encoding/json"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

type kept struct {
	most int            // bytes; 0 if nothing is to be kept
	raw  []byte         // what stands between the quotes of JSON strings, put together
	lost bool           // the answer has something else than text, or too much of it
	room func(int) bool // whether so many bytes more may be used; nil if they may
	why  string         // why the answer is not resumable if there was no room
}

func (k *kept) add(raw []byte) {
	switch {
	case k.lost:
	case len(k.raw)+len(raw) > k.most:
		k.lost, k.raw = true, nil
	case len(k.raw)+len(raw) > cap(k.raw) && !k.grow(len(raw)):
		k.lost, k.raw, k.why = true, nil, NotResumableMemory
	default:
		k.raw = append(k.raw, raw...)
	}
}

func (k *kept) grow(n int) bool {
	const least = 512
	size := max(least, 2*cap(k.raw), len(k.raw)+n)
	if k.room != nil && !k.room(size-cap(k.raw)) {
		return false
	}
	k.raw = append(make([]byte, 0, size), k.raw...)
	return true
}

// unpredictable records that a part of the answer, other than reasoning, comes
// back in another form.
func (a *Answer) unpredictable() {
	a.predictable, a.kept.lost = false, true
	a.pinStream(NotResumableUnread)
}

// KeepText lets the answer keep its text for Text, up to most bytes of JSON. Call
// it before the first Write.
func (a *Answer) KeepText(most int) { a.kept.most = most }

// Text returns the answer's text without reasoning, as the content of a JSON
// string. The client sends this back as the assistant's message of its next turn.
// It is nil if the text was not kept, is empty, or is only a part of what comes
// back (tool calls). It is also nil if the answer is unfinished or failed. Ask
// after Finish.
func (a *Answer) Text() []byte {
	if a.kept.lost || a.Failed() || a.finished == 0 && !a.done {
		return nil
	}
	raw := withoutThinking(a.kept.raw)
	if len(raw) == 0 || !json.Valid(slices.Concat([]byte{'"'}, raw, []byte{'"'})) {
		return nil
	}
	return raw
}

// next is the message behind the answer. Templates write the last turn otherwise
// than those before, with its reasoning or with the tools. So another must follow.
const next = `{"role":"user","content":"."}`

// NextTurn appends to dst a body with which an engine computes the beginning of a
// conversation's next turn. That is the last body with the answer's Text as one
// more message, for one token and no stream. It omits what concerns the last turn
// only: nvext, the answer's form, the request's id and priority. It is not ok if
// the body was not parsed or has no messages. It is not ok either if the engine keeps
// state for it: a session, or a transfer of KV blocks.
func (r *Request) NextTurn(dst, body, answer []byte) (out []byte, ok bool) {
	e := r.Editor(body)
	if e == nil || e.At("messages").First(body) != '[' || !e.At("messages").HasContent(body) ||
		slices.ContainsFunc(ofTheEngine, e.IsSet) {
		return dst, false
	}
	e.OnlyLast("messages")
	e.Drop(func(name string, _ rawjson.Span) bool { return ofTheTurn(name) })
	end := e.At("messages").End - 1
	e.Replace(rawjson.Edit{
		Span: rawjson.Span{Start: end, End: end},
		Text: slices.Concat([]byte(`,{"role":"assistant","content":"`), answer, []byte(`"},`+next)),
	})
	e.Set("max_tokens", []byte("1"))
	e.Set("stream", []byte("false"))
	return rawjson.Splice(dst, body, e.Edits()), true
}

// ofTheEngine name state that the engine keeps or moves.
var ofTheEngine = []string{"session_params", "kv_transfer_params", "bootstrap_room"}

// ofTheTurn returns whether a member concerns one turn's answer only.
func ofTheTurn(key string) bool {
	switch key {
	case "nvext", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
		"logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "thinking", "thinking_token_budget",
		"store", "request_id", "rid", "priority":
		return true
	}
	return false
}
