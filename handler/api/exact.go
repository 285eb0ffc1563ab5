package api

import (
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const nameReturnIDs = "return_token_ids" // vLLM's and SGLang's

// AsksIDs returns whether a request asks for the ids of the answer's tokens.
func AsksIDs(e *Editor) bool { return string(e.Value(nameReturnIDs)) == "true" }

// AskIDs has the engine return the ids of the answer's tokens.
func AskIDs(e *Editor) { e.Set(nameReturnIDs, []byte("true")) }

// CutIDs appends the edits that take what AskIDs has asked for out of an event's data. vLLM writes
// null where nobody asks.
func CutIDs(edits []rawjson.Edit, data []byte) []rawjson.Edit {
	if i := rawjson.SkipSpace(data, 0); i < len(data) && data[i] == '{' {
		return cutIDs(edits, data, i)
	}
	return edits
}

// cutIDs does so in the object at b[i].
func cutIDs(edits []rawjson.Edit, b []byte, i int) []rawjson.Edit {
	c := rawjson.Enter(b, i)
	for c.Next() {
		key, v := c.Key(), c.Value()
		switch string(key) {
		case "token_ids", "prompt_token_ids":
			if v.First(b) == '[' {
				edits = append(edits, rawjson.Edit{Span: v, Text: null})
			}
		case "choices":
			for choice := range v.Objects(b) {
				edits = cutIDs(edits, b, choice.Start)
			}
		}
	}
	return edits
}

var null = []byte("null")

// exactly returns whether another engine can go on with the ids of the answer so far. They show
// neither text that is held back for a stop string, nor where that began.
func (a *Answer) exactly() bool {
	t := &a.track
	soft := t.stays == "" || t.stays == StaysReasoning || t.stays == StaysToolCall
	return t.exact && soft && !t.stops && a.ids.whole()
}
