package engine

import (
	"crypto/rand"
	"encoding/json"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// ScopedSession returns what a session of a request with a salt is called in an
// engine: the client's id behind a digest of the salt, so that no tenant can name
// another's. An id that is called so already stays as it is, for an engine tells
// it to its client. Without a salt that is the client's own.
func ScopedSession(salt, id string) string {
	if salt == "" || id == "" {
		return id
	}
	scope := scopeOf(salt)
	if strings.HasPrefix(id, scope) {
		return id
	}
	return scope + id
}

// scopeOf returns what stands before the sessions' ids of requests with a salt.
func scopeOf(salt string) string { return nvext.Digest([]byte(salt))[:32] + ":" }

const nameSession, nameParams = "session_id", "session_params"

// maxWritten is the longest text of a client's that goes behind a digest of its
// salt, as it is written in the body, in bytes: of a longer one a digest does.
// maxParams is the longest session_params of nvext that is written anew.
const maxWritten, maxParams = 1 << 10, 128 << 10

// sglangSessions scopes the sessions that the client's own members name. What
// cannot be scoped is cut out, for it could name another tenant's.
func (f *fit) sglangSessions() {
	if f.Salt == "" || f.Body == nil {
		return
	}
	f.scope = scopeOf(f.Salt) // once: the salt may be long, and sessions many
	if raw := f.Body.Value(nameSession); f.API == OpenSession && (raw == nil || raw[0] != '"') {
		f.text(nameSession, f.scope+rand.Text()) // or SGLang would make one up, which is nobody's
	} else {
		f.scopeID()
	}
	if f.said&SessionParams == 0 || !f.onSessions() { // else those of nvext take their place
		f.scopeParams()
	}
}

// onSessions tells whether nvext's session_params go to SGLang in this API.
func (f *fit) onSessions() bool { return f.on(apiChat, apiCompletions, apiGenerate) }

// scoped returns what becomes of a session's id, both as JSON has them. It is not
// ok if that is no text. The empty one is a name like others in SGLang.
func (f *fit) scoped(raw []byte) (text []byte, ok bool) {
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

// scopeID scopes the body's session_id.
func (f *fit) scopeID() {
	raw := f.Body.Value(nameSession)
	if isNull(raw) {
		return
	}
	if text, ok := f.scoped(raw); ok {
		f.Body.Set(nameSession, text)
		return
	}
	f.Body.Cut(nameSession)
	f.Lacks |= SessionParams
}

// scopeParams scopes the body's session_params: one object, or in a list one for
// each prompt. Their rid stays, for SGLang looks for it only within the session.
func (f *fit) scopeParams() {
	at, ok := f.Body.Inner(nameParams, "id")
	edits, ok := f.scopeAll(at, ok)
	if !ok {
		f.Body.Cut(nameParams)
		f.Lacks |= SessionParams
		return
	}
	for _, e := range edits {
		f.Body.Replace(e)
	}
}

// scopeAll returns the changes that scope the ids at places of the body. It is not
// ok if one of them is no text, or they were not found.
func (f *fit) scopeAll(at []rawjson.Span, found bool) (edits []rawjson.Edit, ok bool) {
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
func (f *fit) sessionParams() {
	at, ok := f.Body.NVExt()
	if f.said&SessionParams == 0 || !ok || !f.onSessions() {
		return
	}
	raw := f.part(at, f.Ext.SessionParams.Span)
	if f.Salt != "" {
		raw, ok = f.scopedParams(at, f.Ext.SessionParams.Span)
	}
	if f.takes(SessionParams, ok) {
		f.Body.Set(nameParams, raw)
	} else {
		f.Body.Cut(nameParams)
	}
}

// scopedParams returns the session_params of the nvext at a place of the body with
// their session scoped. It is not ok if they are too long, of white space or of
// what is there twice.
func (f *fit) scopedParams(nv, part rawjson.Span) (text []byte, ok bool) {
	all := nv.Within(part)
	if all.End-all.Start > maxParams {
		return nil, false
	}
	at, ok := f.Body.InnerAt(all, "id")
	edits, ok := f.scopeAll(at, ok)
	for i := range edits {
		edits[i].Start -= all.Start
		edits[i].End -= all.Start
	}
	return rawjson.Splice(nil, f.Body.Text(all), edits), ok
}

// behind returns a JSON text with something before it that needs no escapes. The
// text stays as it is written.
func behind(prefix string, raw []byte) []byte {
	return append([]byte(`"`+prefix), raw[1:]...)
}

// quoted returns a text as JSON.
func quoted(s string) []byte { return rawjson.AppendString(nil, s) }
