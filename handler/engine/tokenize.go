package engine

import (
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// Post returns a server's answer to a POST request with a JSON body: the status
// and the whole body. The status is 0 if there is no answer or the answer is too
// long.
type Post func(path string, body []byte) (status int, answer []byte)

// Question asks for the token ids of a request's prompt. The prompt has no media:
// only computing turns those into tokens.
type Question struct {
	// API is the name of the client's API.
	API string
	// Body is the request's body, without other edits.
	Body *rawjson.Editor
	// Text is the prompt as a JSON string, nil for a conversation.
	Text []byte
	// Raw says that the client wants no chat template.
	Raw bool
}

// Tokenize asks the engine for the token ids that it would compute for a request.
// It returns a JSON list without spaces. It returns nil if the engine has no
// tokenizer, gives another answer, or would tokenize another prompt than it
// computes. The engine computes nothing for it.
func (e *Engine) Tokenize(q *Question, post Post) []byte {
	k, fits := kindOf(e.Type), false
	switch q.API {
	case api.NameChat:
		fits = q.Text == nil
	case api.NameCompletions, api.NameGenerate: // an engine without token ids in the latter lacks that API
		fits = q.Text != nil && k.tokenMember(q.API) != ""
	}
	if !fits || k.tokenize == nil {
		return nil
	}
	return k.tokenize(q, post)
}

// whole returns the body without nvext, and without the members that ask for a
// stream.
func (q *Question) whole() []byte {
	q.Body.CutGiven(nameNVExt)
	q.Body.Cut("stream")
	q.Body.Cut("stream_options")
	return q.Body.Apply()
}

// only returns an object, still open, of those members of the body.
func (q *Question) only(names ...string) *rawjson.Object {
	var o rawjson.Object
	o.Open()
	for _, name := range names {
		if v := q.Body.Value(name); v != nil {
			o.Raw(name, v)
		}
	}
	return &o
}

// says returns whether the body has one of these members, and not as null.
func (q *Question) says(names ...string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return !isNull(q.Body.Value(name)) })
}

// tokenize closes a body and posts it to the tokenizer.
func tokenize(post Post, o *rawjson.Object) []byte {
	o.Close()
	status, answer := post("/tokenize", o.Buf)
	return tokensIn(status, answer, "tokens")
}

// tokensIn returns the token ids in a member of an answer, which is an object or
// a list of one object. It returns nil if they are missing or malformed.
func tokensIn(status int, answer []byte, member string) []byte {
	if status != http.StatusOK || !gjson.ValidBytes(answer) {
		return nil
	}
	in := gjson.ParseBytes(answer)
	if in.IsArray() {
		if in.Get("#").Int() != 1 {
			return nil
		}
		in = in.Get("0")
	}
	list := in.Get(member)
	if !list.IsArray() {
		return nil
	}
	if ids, n := nvext.IDs([]byte(list.Raw)); n > 0 {
		return ids
	}
	return nil
}

// tokenMember returns the member for token ids in an API, empty if there is none. All
// engines accept ids as the prompt of completions. In a chat, the ids replace the
// result of the template.
func (k *kind) tokenMember(of string) string {
	if of == api.NameCompletions {
		return "prompt"
	}
	return k.tokens[of]
}

// TakesTokenData returns whether the engine accepts the ids of token_data as the
// prompt of a request of an API. It returns false for an engine that reads nvext,
// which decides that itself.
func (e *Engine) TakesTokenData(api string) bool {
	k := kindOf(e.Type)
	return !k.readsNVExt && k.tokenMember(api) != ""
}

// giveTokens makes the ids of token_data the engine's prompt, if the caller has
// planned that and the engine accepts them.
func (f *adapter) giveTokens() {
	to := f.tokenMember(f.API)
	at := f.Body.Given(nameNVExt)
	if !f.takes(TokenData, at.End > 0 && to != "" && f.GiveTokens) {
		return
	}
	f.Body.Set(to, at.Within(f.Ext.TokenSpan).Of(f.Body.Body))
	if f.on(api.NameGenerate) {
		f.Body.Cut("text")
	}
}
