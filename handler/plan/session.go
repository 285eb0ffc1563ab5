package plan

import (
	"fmt"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/zeebo/xxh3"
)

// Session is the session that the request is a turn of.
type Session struct {
	Key   string        // names its binding; empty if there is no session
	Scope uint32        // of its tenant; 0 if it belongs to none
	TTL   time.Duration // of its binding, as the client asks; 0 if it does not
	Final bool          // it ends with this turn
	Held  bool          // the engine itself holds the session's state
}

// KeySource is a place of a session's key: a header, a member of the body, or nvext if both
// are empty.
type KeySource struct {
	header string
	body   func(*api.Request) string
}

// ParseKeySource parses an operand of the operator's option.
func ParseKeySource(name string) (KeySource, error) {
	switch name {
	case "nvext":
		return KeySource{}, nil
	case "body:prompt_cache_key":
		return KeySource{body: func(r *api.Request) string { return r.CacheKey }}, nil
	case "body:session_id":
		return KeySource{body: func(r *api.Request) string { return r.SessionID }}, nil
	case "body:metadata.user_id":
		return KeySource{body: func(r *api.Request) string { return r.UserID }}, nil
	}
	if header, ok := strings.CutPrefix(name, "header:"); ok && header != "" {
		return KeySource{header: textproto.CanonicalMIMEHeaderKey(header)}, nil
	}
	return KeySource{}, fmt.Errorf("affinity key: must be nvext, header:<name>, body:prompt_cache_key, body:session_id or body:metadata.user_id, got %q", name)
}

// session returns the request's session. The timeout and the close action of nvext
// count only if nvext also gives the session's key.
func (rd *Reader) session(h http.Header, req *api.Request, ext *nvext.Ext) Session {
	for _, source := range rd.Keys {
		var key string
		var s Session
		switch {
		case source.header != "":
			if values := h[source.header]; len(values) > 0 {
				key = strings.TrimSpace(values[0])
			}
		case source.body != nil:
			key = source.body(req)
		default:
			key = ext.Session()
			if c := &ext.SessionControl; c.SessionID != "" {
				s.Final = c.Action == nvext.ActionClose
				if c.Timed {
					s.TTL = c.Timeout
				}
			}
		}
		if key == "" {
			continue
		}
		if s.Held = req.SessionHeld || ext.SessionParams.ID != ""; rd.HeldOnly && !s.Held {
			break
		}
		s.Key, s.Scope = TenantKey(req.Salt, key), tenantScope(req.Salt)
		return s
	}
	return Session{}
}

// maxSessionKey is the length in bytes of the longest session key that the router stores. It
// stores the digest of a longer key.
const maxSessionKey = 256

// Keys that the router makes begin with own. No client's key is kept with that
// beginning: it could take another's place.
const (
	own        = "\x00"
	ownTenant  = own + "t" // a session of a tenant
	ownDigest  = own + "d" // a key that the router made, and that is too long
	digestMark = "sha256:"
)

// keptKey returns the form in which a client's session key is kept.
func keptKey(key string) string {
	if len(key) > maxSessionKey || strings.HasPrefix(key, own) {
		return digestMark + nvext.Digest([]byte(key))
	}
	return strings.Clone(key) // it may point into the body
}

// TenantKey returns the form in which a session's key is kept. It includes the request's
// salt, so that no tenant can name another's session.
func TenantKey(salt, key string) string {
	if salt == "" {
		return keptKey(key)
	}
	return bounded(ownTenant + strconv.Itoa(len(salt)) + ":" + salt + key)
}

// tenantScope returns the scope of a salt's sessions, which share the room for bindings with
// other tenants'. Two salts may have one scope.
func tenantScope(salt string) uint32 {
	if salt == "" {
		return 0
	}
	return max(uint32(xxh3.HashString(salt)), 1) //nolint:gosec // half of it is enough
}

// ModelKey returns the key of a session for one of its models.
func ModelKey(session, model string) string {
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

// mustRead refuses a request whose body the router could not read, for a tenant or if
// enforce_cache_salt is on. The body could name another tenant's cache or session.
func (rd *Reader) mustRead(p *Plan) error {
	if p.unread == "" || p.Ext.Tenant == "" && !rd.EnforcesSalt {
		return nil
	}
	status := http.StatusBadRequest
	switch p.unread {
	case fallbackOversized:
		status = http.StatusRequestEntityTooLarge
	case FallbackMemory:
		status = http.StatusServiceUnavailable
	}
	return &api.Refusal{API: OrUnplanned(p.API), Status: status, Code: api.CodeUnreadable, Err: fmt.Errorf(
		"the router cannot read the body (%s), and must, because the request has a tenant or enforce_cache_salt is on", p.unread)}
}

// saltIsText refuses a salt that is not a string if enforce_cache_salt is on and no tenant's
// salt replaces it. No known engine uses such a salt.
func (rd *Reader) saltIsText(p *Plan) error {
	req := p.Parsed()
	if !rd.EnforcesSalt || req == nil || req.OddSalt == "" || p.Ext.Salt("") != "" || !p.prefills {
		return nil
	}
	return &api.Refusal{API: OrUnplanned(p.API), Status: http.StatusBadRequest, Code: api.CodeShared, Param: "cache_salt", Err: fmt.Errorf(
		"cache_salt: must be a string, got %s", req.OddSalt)}
}
