package handler

import (
	"fmt"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// session is the session that the request is a turn of.
type session struct {
	key  string        // what its worker is remembered by; empty if there is no session
	idle time.Duration // how long the client wants it remembered; 0 if the client does not say
	last bool          // it ends with this turn
	held bool          // the engine itself holds the session's state
}

// keySource is a place where a session's key is looked for: a header, a member of the
// body, or its nvext if both are empty.
type keySource struct {
	header string
	body   func(*api.Request) string
}

// parseKeySource parses an operand of the operator's option.
func parseKeySource(name string) (keySource, error) {
	switch name {
	case "nvext":
		return keySource{}, nil
	case "body:prompt_cache_key":
		return keySource{body: func(r *api.Request) string { return r.CacheKey }}, nil
	case "body:session_id":
		return keySource{body: func(r *api.Request) string { return r.SessionID }}, nil
	case "body:metadata.user_id":
		return keySource{body: func(r *api.Request) string { return r.UserID }}, nil
	}
	if header, ok := strings.CutPrefix(name, "header:"); ok && header != "" {
		return keySource{header: textproto.CanonicalMIMEHeaderKey(header)}, nil
	}
	return keySource{}, fmt.Errorf("affinity key: must be nvext, header:<name>, body:prompt_cache_key, body:session_id or body:metadata.user_id, got %q", name)
}

// session returns the request's session. The timeout and the close action of nvext
// count only if nvext also gives the session's key.
func (rd *reader) session(r *http.Request, req *api.Request, ext *nvext.Ext) session {
	for _, source := range rd.keys {
		var key string
		var s session
		switch {
		case source.header != "":
			if values := r.Header[source.header]; len(values) > 0 {
				key = strings.TrimSpace(values[0])
			}
		case source.body != nil:
			key = source.body(req)
		default:
			key = ext.Session()
			if c := &ext.SessionControl; c.SessionID != "" {
				s.last = c.Action == nvext.ActionClose
				if c.Timed {
					s.idle = c.Timeout
				}
			}
		}
		if key == "" {
			continue
		}
		if s.held = req.SessionHeld || ext.SessionParams.ID != ""; rd.heldOnly && !s.held {
			break
		}
		s.key = tenantKey(req.Salt, key)
		return s
	}
	return session{}
}

// maxSessionKey is the longest session key that is kept as it is, in bytes. Of a longer
// one the digest is kept.
const maxSessionKey = 256

// Keys that the router makes begin with own. No client's key is kept with that
// beginning: it could take another's place.
const (
	own        = "\x00"
	ownTenant  = own + "t" // a session of a tenant
	ownDigest  = own + "d" // a key that the router made, and that is too long
	digestMark = "sha256:"
)

// keptKey returns what a session's key is kept as.
func keptKey(key string) string {
	if len(key) > maxSessionKey || strings.HasPrefix(key, own) {
		return digestMark + nvext.Digest([]byte(key))
	}
	return strings.Clone(key) // it may point into the body
}

// tenantKey returns what a session's key is kept as. It includes the request's salt, so
// that no tenant can name another's session.
func tenantKey(salt, key string) string {
	if salt == "" {
		return keptKey(key)
	}
	return bounded(ownTenant + strconv.Itoa(len(salt)) + ":" + salt + key)
}

// modelKey returns what a session is kept as for one of its models.
func modelKey(session, model string) string {
	key := session + own + model
	if strings.HasPrefix(session, own) {
		return bounded(key)
	}
	return keptKey(key)
}

// bounded returns a key that the router made, or its digest if the key is too long.
func bounded(key string) string {
	if len(key) > maxSessionKey {
		return ownDigest + nvext.Digest([]byte(key))
	}
	return key
}
