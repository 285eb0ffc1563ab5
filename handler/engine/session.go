package engine

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/tidwall/gjson"
)

// SessionCall is a request of the router's own about a session that an engine holds:
// a POST with a JSON body. It names no rank: it goes to the engine's address.
type SessionCall struct {
	Path string
	Body []byte
}

// sessions says how an engine type holds sessions.
type sessions struct {
	// apis are the APIs in which the engine heeds a session. In further ones only
	// some builds do.
	apis, further []string
	open          func(id string, timeout time.Duration) SessionCall
	opened        func(status int, answer []byte) error
	close         func(id string) SessionCall
	closed        func(status int) bool
}

// held returns how the engine holds sessions, nil if it holds none.
func (e *Engine) held() *sessions {
	if !e.Settings.Sessions.or(!e.Info.NoSessions) {
		return nil
	}
	return kindOf(e.Type).sessions
}

// HoldsSessions returns whether the engine can hold sessions for an API: whether a
// request there can name its session in Request.Session. It returns true for an engine
// that does not report whether its sessions are on.
func (e *Engine) HoldsSessions(api string) bool {
	s := e.held()
	return s != nil && (slices.Contains(s.apis, api) || e.Settings.Sessions == On && slices.Contains(s.further, api))
}

// OpenSession returns the request that opens a session. The engine closes the session
// itself after an idle timeout. It is not ok if the engine has no sessions.
func (e *Engine) OpenSession(id string, timeout time.Duration) (call SessionCall, ok bool) {
	s := e.held()
	if s == nil {
		return call, false
	}
	return s.open(id, timeout), true
}

// Opened returns nil if the answer to OpenSession says that the session is open, also
// if it was open already. Other errors contain a short part of the answer.
func (e *Engine) Opened(status int, answer []byte) error {
	s := kindOf(e.Type).sessions
	if s == nil {
		return errors.New("the engine has no sessions")
	}
	return s.opened(status, answer)
}

// CloseSession returns the request that closes a session. It depends on the engine's
// type only: settings and reports may have changed since the session was opened. It
// returns the zero SessionCall for a type without sessions.
func (e *Engine) CloseSession(id string) SessionCall {
	s := kindOf(e.Type).sessions
	if s == nil {
		return SessionCall{}
	}
	return s.close(id)
}

// Closed returns whether the answer to CloseSession settles it: the session is closed,
// or the engine does not know it. Otherwise another attempt may succeed.
func (e *Engine) Closed(status int) bool {
	s := kindOf(e.Type).sessions
	return s == nil || s.closed(status)
}

// SessionID returns the id by which an engine knows a client's session: the client's
// own if there is neither salt nor scope. Else it begins with their digests, as the ids
// in the client's own members do, so that no tenant can name another one's session. A
// digest replaces an id of more than a kilobyte. It is empty for an empty id.
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

// maxSaid is the longest part of an engine's answer that an error contains, in bytes.
const maxSaid = 200

// refused returns the error for an answer to a SessionCall.
func refused(status int, answer []byte) error {
	if said := messageOf(answer); said != "" {
		return fmt.Errorf("the engine answered with status %d: %s", status, said)
	}
	return fmt.Errorf("the engine answered with status %d", status)
}

// messageOf returns the message in an engine's error: the printable characters of its
// beginning.
func messageOf(answer []byte) string {
	said := string(answer[:min(len(answer), 4*maxSaid)])
	if gjson.ValidBytes(answer) {
		for _, path := range []string{"error.message", "message", "detail"} {
			if v := gjson.GetBytes(answer, path); v.Type == gjson.String {
				said = v.Str
				break
			}
		}
	}
	said = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, said[:min(len(said), 4*maxSaid)])
	return strings.TrimSpace(said[:min(len(said), maxSaid)])
}
