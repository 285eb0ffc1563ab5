package engine

import (
	"crypto/rand"
	"encoding/json"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

const nameSession, nameParams, nameID = "session_id", "session_params", "id"

// maxWritten is the longest JSON text of a client that is kept behind its salt's
// digest, in bytes. A digest replaces a longer one. maxParams is the longest
// session_params of nvext that is rewritten, in bytes.
const maxWritten, maxParams = 1 << 10, 128 << 10

// sglangSessions names the session that the request continues in session_params: in
// those of nvext, else in the client's own. Their other members stay. With a salt, it
// scopes the sessions that the client names, and removes members that it cannot scope:
// they could name another tenant's session.
func (f *adapter) sglangSessions() {
	if f.Salt != "" {
		f.scope = scopeOf(f.Salt)
		f.scopeSessionID()
	}
	turns := f.on(api.NameChat, api.NameCompletions, api.NameGenerate)
	at, has := f.Body.NVExt()
	switch {
	case turns && has && f.takes(SessionParams, true):
		f.takeParams(f.Body.Text(at.Within(f.Ext.SessionParams.Span)))
	case turns && f.Session != "":
		if in, ok := f.Body.Object(nameParams); ok {
			in.Set(nameID, quoted(f.Session))
		} else { // such as a list, for several prompts: one session has one turn at a time
			f.Body.Set(nameParams, onlyID(f.Session))
		}
	case f.Salt != "":
		f.scopeParams()
	}
}

// takeParams gives SGLang the session_params of nvext. Where the id changes, the members are
// sorted, and of equal ones only the last stays.
func (f *adapter) takeParams(raw []byte) {
	if f.Session == "" && f.Salt == "" {
		f.Body.Set(nameParams, raw)
		return
	}
	var in map[string]json.RawMessage
	ok := len(raw) <= maxParams && json.Unmarshal(raw, &in) == nil && in != nil
	switch {
	case f.Session != "" && ok:
		in[nameID] = quoted(f.Session)
	case f.Session != "":
		f.Body.Set(nameParams, onlyID(f.Session))
	case ok && !isNull(in[nameID]):
		in[nameID], ok = f.scoped(in[nameID])
	}
	if ok {
		raw, _ = json.Marshal(in) // its values were read from JSON
		f.Body.Set(nameParams, raw)
		return
	}
	f.Unsupported |= SessionParams
	if f.Session == "" {
		f.Body.Cut(nameParams)
	}
}

func onlyID(session string) []byte {
	return slices.Concat([]byte(`{"id":`), quoted(session), []byte{'}'})
}

// scopeSessionID scopes the client's own session_id.
func (f *adapter) scopeSessionID() {
	raw := f.Body.Value(nameSession)
	if text, ok := f.scoped(raw); f.API == OpenSession && (raw == nil || raw[0] != '"') {
		f.text(nameSession, f.scope+rand.Text()) // SGLang would choose an id without a scope
	} else if ok {
		f.Body.Set(nameSession, text)
	} else if !isNull(raw) {
		f.Body.Cut(nameSession)
		f.Unsupported |= SessionParams
	}
}

// scopeParams scopes the client's own session_params, if they are one object. The router
// refuses lists: see package plan. The rid stays: SGLang looks it up within the session only.
func (f *adapter) scopeParams() {
	if isNull(f.Body.Value(nameParams)) {
		return
	}
	if in, ok := f.Body.Object(nameParams); ok {
		id := in.Value(nameID)
		if isNull(id) {
			in.Cut(nameID) // of several, the last counts
			return
		}
		if text, ok := f.scoped(id); ok {
			in.Set(nameID, text)
			return
		}
	}
	f.Body.Cut(nameParams)
	f.Unsupported |= SessionParams
}

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

// behind returns a JSON text with a prefix that needs no escapes.
func behind(prefix string, raw []byte) []byte {
	return append([]byte(`"`+prefix), raw[1:]...)
}
