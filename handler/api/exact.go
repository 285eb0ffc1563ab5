package api

import (
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const nameReturnIDs = "return_token_ids" // vLLM's and SGLang's

// mostExact is the longest body of a request whose answer goes on by ids, in bytes. The first event
// has the prompt's ids, and must be shorter than rawjson.MaxFrame.
const mostExact = 384 << 10

// GoesOnExactly returns whether another engine may go on with the answer to a prompt of text by the
// ids of its tokens. They do not show what an engine holds back for a stop string.
func (r *Request) GoesOnExactly(body []byte) bool {
	e := r.Editor(body)
	return r.Kind == Text && r.Media == 0 && len(body) <= mostExact && r.whyNotResumable(e) == "" && len(stops(e)) == 0
}

// AsksIDs returns whether a request asks for the ids of the answer's tokens.
func AsksIDs(e *rawjson.Editor) bool {
	v := e.Value(nameReturnIDs)
	return v != nil && !isNo(v)
}

// AskIDs has the engine return the ids of the answer's tokens.
func AskIDs(e *rawjson.Editor) { e.Set(nameReturnIDs, []byte("true")) }

// CutIDs appends the edits that take what AskIDs has asked for out of an event's data. vLLM writes
// null where nobody asks. With all, it sends the event for the ids only.
func CutIDs(edits []rawjson.Edit, data []byte) (_ []rawjson.Edit, all bool) {
	for key, v := range rawjson.Document(data).Members(data) {
		switch string(key) {
		case "prompt_token_ids":
			edits = withoutIDs(edits, data, v)
		case "choices":
			n := 0
			for choice := range v.Objects(data) {
				var delta, finish, ids, prompt rawjson.Span
				choice.Read(data, rawjson.To("delta", &delta), rawjson.To("finish_reason", &finish),
					rawjson.To("prompt_token_ids", &prompt), rawjson.To("token_ids", &ids))
				edits = withoutIDs(withoutIDs(edits, data, prompt), data, ids)
				n++
				all = n == 1 && ids.First(data) == '[' && delta.First(data) == '{' && !delta.HasContent(data) && !finish.HasContent(data)
			}
		}
	}
	return edits, all
}

func withoutIDs(edits []rawjson.Edit, data []byte, ids rawjson.Span) []rawjson.Edit {
	if ids.First(data) != '[' {
		return edits
	}
	return append(edits, rawjson.Edit{Span: ids, Text: []byte("null")})
}

// exactly returns whether another engine can go on with the ids of the answer so far.
func (a *Answer) exactly() bool {
	t := &a.track
	return t.exact && t.request == "" && (t.notResumable == "" || t.notResumable == NotResumableReasoning || t.notResumable == NotResumableToolCall) && a.ids.whole()
}

// LoseIDs has the answer go on without its ids.
func (a *Answer) LoseIDs() { a.ids.lost = true }
