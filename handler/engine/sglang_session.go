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
	if turns && f.Session != "" {
		f.Body.Cut(nameSession) // SGLang refuses it beside session_params
	}
	at := f.Body.Given(nameNVExt)
	switch {
	case turns && at.End > 0 && f.takes(SessionParams, true):
		f.takeParams(at.Within(f.Ext.SessionParams.Span).Of(f.Body.Body))
	case (!turns || f.Session == "") && (f.Salt == "" || isNull(f.Body.Value(nameParams))):
	default:
		if in, ok := f.Body.Object(nameParams); !ok || !f.nameTurn(in, turns) {
			f.dropParams(turns)
		}
	}
}

// takeParams gives SGLang the session_params of nvext.
func (f *adapter) takeParams(raw []byte) {
	if f.Session != "" || f.Salt != "" {
		var in *rawjson.Editor
		if len(raw) <= maxParams {
			in = rawjson.EditObject(raw)
		}
		if in == nil || !f.nameTurn(in, true) {
			f.Unsupported |= SessionParams
			f.dropParams(true)
			return
		}
		raw = in.Apply()
	}
	f.Body.Set(nameParams, raw)
}

// nameTurn names the session in session_params: the turn's, or else the client's with its scope.
// It returns false for an id that cannot have one.
func (f *adapter) nameTurn(in *rawjson.Editor, turns bool) bool {
	id := in.Value(nameID)
	switch {
	case turns && f.Session != "":
		in.Set(nameID, quoted(f.Session))
	case f.Salt == "":
	case isNull(id):
		in.Cut(nameID) // of several, the last counts
	default:
		text, ok := f.scoped(id)
		if !ok {
			return false
		}
		in.Set(nameID, text)
	}
	return true
}

// dropParams removes session_params that cannot be scoped, such as a list for several prompts.
// A session that the engine holds has one turn at a time.
func (f *adapter) dropParams(turns bool) {
	if turns && f.Session != "" {
		f.Body.Set(nameParams, onlyID(f.Session))
		return
	}
	f.Unsupported |= SessionParams
	f.Body.Cut(nameParams)
}

func onlyID(session string) []byte {
	return slices.Concat([]byte(`{"id":`), quoted(session), []byte{'}'})
}

// scopeSessionID scopes the client's own session_id.
func (f *adapter) scopeSessionID() {
	raw := f.Body.Value(nameSession)
	if text, ok := f.scoped(raw); f.API == openSession && (raw == nil || raw[0] != '"') {
		f.text(nameSession, f.scope+rand.Text()) // SGLang would choose an id without a scope
	} else if ok {
		f.Body.Set(nameSession, text)
	} else if !isNull(raw) {
		f.Body.Cut(nameSession)
		f.Unsupported |= SessionParams
	}
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
	return append([]byte(`"`+f.scope), raw[1:]...), true
}
