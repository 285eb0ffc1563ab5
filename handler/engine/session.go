package engine

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// ScopedSession returns what a session of a request with a salt is called in an
// engine: the client's id behind a digest of the salt, so that no tenant can name
// another's. An id that is called so already stays as it is, for an engine tells
// it to its client. Without a salt that is the client's own.
func ScopedSession(salt, id string) string {
	if salt == "" || id == "" {
		return id
	}
	sum := sha256.Sum256([]byte(salt))
	scope := hex.EncodeToString(sum[:16]) + ":"
	if strings.HasPrefix(id, scope) {
		return id
	}
	return scope + id
}

// sglangSessions scopes the sessions that the client's own members name.
// session_params are one object, or in a list one for each prompt; their rid
// names a request within the session, and is looked for nowhere else.
func (f *fit) sglangSessions() {
	if f.Salt == "" || f.Body == nil {
		return
	}
	if f.API == OpenSession && isNull(f.Body.Value(nameSession)) {
		f.text(nameSession, ScopedSession(f.Salt, rand.Text())) // or SGLang would make one up, which is nobody's
	} else {
		f.scope(f.Body, nameSession)
	}
	if isNull(f.Body.Value(nameParams)) || f.said&SessionParams != 0 && f.onSessions() {
		return
	}
	if in, ok := f.Body.Object(nameParams); ok {
		f.scope(in, "id")
		return
	}
	all, _ := f.Body.Elements(nameParams)
	for _, in := range all {
		f.scope(in, "id")
	}
}

const nameSession, nameParams = "session_id", "session_params"

// onSessions tells whether nvext's session_params go to SGLang in this API.
func (f *fit) onSessions() bool { return f.on(apiChat, apiCompletions, apiGenerate) }

// scope scopes the session that a member of an object names.
func (f *fit) scope(in *api.Editor, member string) {
	var id string
	raw := in.Value(member)
	if isNull(raw) || json.Unmarshal(raw, &id) != nil || id == "" {
		return
	}
	in.Set(member, quoted(ScopedSession(f.Salt, id)))
}

// sessionParams gives SGLang the session of nvext.
func (f *fit) sessionParams() {
	at, ok := f.Body.NVExt()
	if !f.takes(SessionParams, ok && f.onSessions()) {
		return
	}
	p := &f.Ext.SessionParams
	raw := f.part(at, p.Span)
	if f.Salt != "" && p.ID != "" {
		start, end := p.IDSpan.Start-p.Span.Start, p.IDSpan.End-p.Span.Start
		scoped := append([]byte(nil), raw[:start]...)
		raw = append(append(scoped, quoted(ScopedSession(f.Salt, p.ID))...), raw[end:]...)
	}
	f.Body.Set(nameParams, raw)
}

// quoted returns a text as JSON.
func quoted(s string) []byte {
	q, _ := json.Marshal(s) // there is no text that it refuses
	return q
}
