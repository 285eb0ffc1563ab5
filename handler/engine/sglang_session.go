package engine

import (
	"crypto/rand"
	"encoding/json"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const nameSession, nameParams, nameID = "session_id", "session_params", "id"

// maxWritten is the longest JSON text of a client that is kept behind its salt's
// digest, in bytes. A digest replaces a longer one. maxParams is the longest
// session_params of nvext that is rewritten, in bytes.
const maxWritten, maxParams = 1 << 10, 128 << 10

// sglangSessions scopes the sessions in the client's own members. It removes members
// that it cannot scope: they could name another tenant's session.
func (f *adapter) sglangSessions() {
	held := f.Session != "" && f.onSessions()
	if held {
		f.turn()
	}
	if f.Salt == "" {
		return
	}
	f.scope = scopeOf(f.Salt) // once: a salt may be long, and there may be many sessions
	raw := f.Body.Value(nameSession)
	if text, ok := f.scoped(raw); f.API == OpenSession && (raw == nil || raw[0] != '"') {
		f.text(nameSession, f.scope+rand.Text()) // SGLang would choose an id without a scope
	} else if ok {
		f.Body.Set(nameSession, text)
	} else if !isNull(raw) {
		f.Body.Cut(nameSession)
		f.Unsupported |= SessionParams
	}
	if !held && (f.requested&SessionParams == 0 || !f.onSessions()) { // else nvext's replace them
		f.scopeParams()
	}
}

// turn names the session that the request continues in session_params: in those of
// nvext, else in the client's own. Their other members stay.
func (f *adapter) turn() {
	id := quoted(f.Session)
	if at, ok := f.Body.NVExt(); ok && f.takes(SessionParams, true) {
		f.Body.Set(nameParams, f.withID(at.Within(f.Ext.SessionParams.Span), id))
	} else if in, ok := f.Body.Object(nameParams); ok {
		in.Set(nameID, id)
	} else { // such as a list, for several prompts: one session has one turn at a time
		f.Body.Set(nameParams, onlyID(id))
	}
}

func onlyID(id []byte) []byte { return slices.Concat([]byte(`{"id":`), id, []byte{'}'}) }

// withID returns the object at a place of the body with another id.
func (f *adapter) withID(at rawjson.Span, id []byte) []byte {
	raw := f.Body.Text(at)
	ids, ok := f.Body.InnerAt(at, nameID)
	if !ok || len(raw) > maxParams {
		f.Unsupported |= SessionParams
		return onlyID(id)
	}
	var edits []rawjson.Edit
	for _, s := range ids {
		edits = append(edits, rawjson.Edit{Span: rawjson.Span{Start: s.Start - at.Start, End: s.End - at.Start}, Text: id})
	}
	if first := rawjson.SkipSpace(raw, 1); len(ids) == 0 && raw[first] == '}' {
		return onlyID(id)
	} else if len(ids) == 0 {
		edits = []rawjson.Edit{{Span: rawjson.Span{Start: 1, End: 1}, Text: slices.Concat([]byte(`"id":`), id, []byte{','})}}
	}
	return rawjson.Splice(nil, raw, edits)
}

// onSessions returns whether SGLang gets nvext's session_params in this API.
func (f *adapter) onSessions() bool { return f.on(api.NameChat, api.NameCompletions, api.NameGenerate) }

// scoped returns a session's id with its scope, both as JSON. It is not ok for an id
// that is no text. An empty id is an ordinary name in SGLang.
func (f *adapter) scoped(raw []byte) (text []byte, ok bool) {
	if len(raw) < 2 || raw[0] != '"' {
		return nil, false
	}
	if len(raw) > maxWritten {
		return quoted(f.scope + digest(raw)), true
	}
	var id string
	if json.Unmarshal(raw, &id) == nil && strings.HasPrefix(id, f.scope) {
		return raw, true
	}
	return behind(f.scope, raw), true
}

// scopeParams scopes the body's session_params: one object, or a list with one for
// each prompt. Their rid stays: SGLang looks it up within the session only.
func (f *adapter) scopeParams() {
	edits, ok := f.scopeAll(f.Body.Inner(nameParams, nameID))
	if !ok {
		f.Body.Cut(nameParams)
		f.Unsupported |= SessionParams
		return
	}
	for _, e := range edits {
		f.Body.Replace(e)
	}
}

// scopeAll returns the edits that scope the ids at these places of the body. It is
// not ok if an id is no text, or the places were not found.
func (f *adapter) scopeAll(at []rawjson.Span, found bool) (edits []rawjson.Edit, ok bool) {
	if !found {
		return nil, false
	}
	for _, s := range at {
		raw := f.Body.Text(s)
		if isNull(raw) {
			continue
		}
		text, ok := f.scoped(raw)
		if !ok {
			return nil, false
		}
		edits = append(edits, rawjson.Edit{Span: s, Text: text})
	}
	return edits, true
}

// sessionParams gives SGLang the session of nvext.
func (f *adapter) sessionParams() {
	at, ok := f.Body.NVExt()
	if f.requested&SessionParams == 0 || !ok || !f.onSessions() {
		return
	}
	at = at.Within(f.Ext.SessionParams.Span)
	raw := f.Body.Text(at)
	if f.Salt != "" && len(raw) > maxParams {
		ok = false
	} else if f.Salt != "" {
		var edits []rawjson.Edit
		edits, ok = f.scopeAll(f.Body.InnerAt(at, nameID))
		for i := range edits {
			edits[i].Start -= at.Start
			edits[i].End -= at.Start
		}
		raw = rawjson.Splice(nil, raw, edits)
	}
	if f.takes(SessionParams, ok) {
		f.Body.Set(nameParams, raw)
	} else {
		f.Body.Cut(nameParams)
	}
}

// behind returns a JSON text with a prefix that needs no escapes.
func behind(prefix string, raw []byte) []byte {
	return append([]byte(`"`+prefix), raw[1:]...)
}
