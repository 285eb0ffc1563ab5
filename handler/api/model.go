package api

import (
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/zeebo/xxh3"
)

// NameIn returns where an answer, or an event of one, names its model. That is its own member, or the one of its
// message (Anthropic's message_start) or response (OpenAI's responses). The member is "model", or "id" for a
// model's description. It returns the zero Span if the bytes have no such text, or not yet.
func NameIn(b []byte, member string) rawjson.Span {
	c, ok := rawjson.Open(b)
	for ok && c.Next() {
		key := c.Key()
		v := c.Value()
		switch {
		case c.Err != nil:
		case string(key) == member && v.First(b) == '"':
			return v
		case member == "model" && (string(key) == "message" || string(key) == "response"):
			if in := v.Get(b, member); in.First(b) == '"' {
				return in
			}
		}
	}
	return rawjson.Span{}
}

// Opening returns a hash of how a conversation opens: of the text of the user's first message. All its turns have
// it in common, in all routers. For a request without messages, it is the hash of the prompt, or of the whole body.
func Opening(body []byte) uint64 {
	var prompt rawjson.Span
	if !rawjson.Document(body).Read(body, rawjson.To("prompt", &prompt), rawjson.To("input", &prompt), rawjson.To("messages", &prompt)) {
		return xxh3.Hash(body)
	}
	for m := range prompt.Objects(body) {
		if m.Get(body, "role").Text(body) == "user" {
			prompt = m.Get(body, "content")
			break
		}
	}
	h := newHasher(64, 0)
	text := conversation{h: &h, b: body}
	text.content(prompt)
	if h.written() == 0 {
		return xxh3.Hash(body)
	}
	return h.sum()
}
