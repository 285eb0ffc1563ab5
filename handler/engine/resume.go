package engine

import (
	"bytes"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// steadyMember is a member with a value that does not depend on the request.
type steadyMember struct{ name, value string }

// Continues returns whether the engine can go on with an answer in an API that another engine has
// begun. All engines go on with the prompt of completions.
func (e *Engine) Continues(name string) bool {
	return name == api.NameCompletions || slices.Contains(kindOf(e.Type).continues, name)
}

// Closes returns whether the engine ends each stream with [DONE], or the last event of its API.
func (e *Engine) Closes() bool { return Shows(e.Type) }

// Continue edits a request, after Adapt, so that the engine gives the rest of an answer.
func (e *Engine) Continue(body *rawjson.Editor, name string, rest *api.Rest) {
	k := kindOf(e.Type)
	if rest.Way != api.WayWhole && rest.Text != "" && slices.Contains(k.continues, name) {
		for _, m := range k.continuing {
			body.Set(m.name, []byte(m.value))
		}
	}
	rest.Ask(body, k.unlimited)
}

// CountText asks the engine for the number of tokens of a text. It is not ok if the engine cannot
// tell.
func (e *Engine) CountText(model, text string, post Post) (n int64, ok bool) {
	k := kindOf(e.Type)
	if k.textMember == "" {
		return 0, false
	}
	var o rawjson.Object
	o.Open()
	o.Text("model", model)
	o.Text(k.textMember, text)
	o.Raw(k.specialMember, []byte("false"))
	ids := tokenize(post, &o)
	if ids == nil {
		return 0, false
	}
	return int64(bytes.Count(ids, []byte{','}) + 1), true
}
