package engine

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/tidwall/gjson"
)

// HoldsSessions returns whether the engine can hold sessions for an API: whether a
// request there can name its session in Request.Session. It returns true for an engine
// that does not report whether its sessions are on.
func (e *Engine) HoldsSessions(api string) bool {
	k, set := kindOf(e.Type), e.Settings.Sessions
	return set.or(!e.Info.NoSessions) &&
		(slices.Contains(k.sessions, api) || set == On && slices.Contains(k.someSessions, api))
}

// Call is a request of the router's own to an engine's address: a POST, with a JSON body if it
// has one.
type Call struct {
	Path string
	Body []byte
}

// OpenSession returns the request that opens a streaming session of SGLang, at each rank. The engine
// closes the session itself after an idle timeout. SGLang requires a capacity, and does not
// limit streaming sessions by it (python/sglang/srt/entrypoints/http_server.py).
func OpenSession(id string, timeout time.Duration) Call {
	const form = `{"capacity_of_str_len":65536,"session_id":%s,"streaming":true,"timeout":%s}`
	seconds := strconv.FormatFloat(timeout.Seconds(), 'f', -1, 64)
	return Call{"/" + openSession, fmt.Appendf(nil, form, quoted(id), seconds)}
}

// Opened returns nil if the answer to OpenSession says that the session is open, also
// if it was open already. Other errors contain a short part of the answer, which is the
// session's id as a JSON string, or null.
func Opened(status int, answer []byte) error {
	if status == 200 {
		if id := gjson.ParseBytes(answer); gjson.ValidBytes(answer) && id.Type == gjson.String && id.Str != "" {
			return nil
		}
		return errors.New("the engine opened no session: its answer is no session id")
	}
	said := string(answer)
	if v := gjson.GetBytes(answer, "error.message"); v.Type == gjson.String {
		said = v.Str
	}
	// SGLang's own words for a session that is open already, and Dynamo's
	if status == 400 && (strings.Contains(said, "same id is still open") || strings.Contains(said, "already exist")) {
		return nil
	}
	return fmt.Errorf("the engine answered with status %d: %.200q", status, said)
}

// CloseSession returns the request that closes a session.
func CloseSession(id string) Call {
	return Call{"/" + closeSession, fmt.Appendf(nil, `{"session_id":%s}`, quoted(id))}
}

// Closed returns whether the answer to CloseSession settles it: the session is closed,
// or the engine does not know it. Otherwise another attempt may succeed.
func Closed(status int) bool { return status/100 == 2 || status == 400 || status == 404 }

// SessionID returns the id by which an engine knows a client's session: the client's
// own if there is neither salt nor scope. Else it begins with their digests, as the ids
// in the client's own members do, so that no tenant can name another one's session. An id
// with them stays unchanged, because the engine reports it to the client. A digest replaces
// an id of more than a kilobyte. It is empty for an empty id.
func SessionID(salt, scope, id string) string {
	if id == "" || salt == "" && scope == "" {
		return id
	}
	prefix := scopeOf(salt)
	if scope != "" {
		prefix += nvext.Digest([]byte(scope))[:32] + ":"
	}
	// as scoped does, for a client that writes the id with these escapes
	if text := quoted(id); len(text) > maxWritten {
		return prefix + digest(text)
	}
	if strings.HasPrefix(id, prefix) {
		return id
	}
	return prefix + id
}

// scopeOf returns the prefix of the session ids of requests with a salt.
func scopeOf(salt string) string { return nvext.Digest([]byte(salt))[:32] + ":" }
