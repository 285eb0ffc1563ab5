package plan

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"
)

// Session is the session that the request is a turn of.
type Session struct {
	Key    affinity.Key // names its binding; zero if there is no session
	Parent affinity.Key // the same of the session that started this one, zero if unknown
	Scope  uint32       // of its tenant; 0 if it belongs to none
	// Identity is the hash of the client's key, without its tenant.
	Identity affinity.Identity
	// Rendezvous is a hash of the client's key and the tenant that is equal in all routers:
	// see kvscore.Request.Session. It is 0 if the request does not name the key itself.
	Rendezvous uint64
	Source     string        // the place of the key, as the operator writes it
	TTL        time.Duration // of its binding, as the client asks; 0 if it does not
	Final      bool          // it ends with this turn
	Held       bool          // the engine itself holds the session's state
	// EngineSession is the id by which the engine may know the session. It is empty if nvext
	// does not name the session: then the engine cannot hold it for the router.
	EngineSession string
	Action        nvext.Action
	// BackedOnly is set if only an engine-backed binding of the session counts.
	BackedOnly bool
}

// Sessions are the rules by which a configuration finds a request's session.
type Sessions struct {
	Keys []KeySource // the first that is not empty counts
	// Scope is a placeholder's name. Its value keeps sessions apart, in addition to the
	// request's salt. Empty adds nothing.
	Scope    string
	HeldOnly bool // only sessions that an engine holds count
	Secret   func() *affinity.Secret
	// Conversation returns the session of an earlier response, which may be another
	// tenant's.
	Conversation func(response string) (affinity.Identity, bool)
}

// maxSessionKey is the longest session key in nvext, in bytes. Other places of a key may have
// another meaning to the client, so a long one there is hashed like all.
const maxSessionKey = 1 << 10

// Opens returns whether the engine must open the session before this turn.
func (s *Session) Opens() bool { return s.Action == nvext.ActionOpen }

// find returns the request's session. The error is the refusal of a key that is too long.
func (s *Sessions) find(r *http.Request, req *api.Request, ext *nvext.Ext) (Session, error) {
	held := req.SessionHeld || ext.SessionParams.ID != ""
	if s.HeldOnly && !held && ext.SessionControl.SessionID == "" {
		return Session{}, nil
	}
	if req.SessionHeld && ext.Session() == "" {
		return s.held(r, req.SessionID, req.Salt), nil
	}
	t := turn{r, req, ext}
	for i := range s.Keys {
		source := &s.Keys[i]
		id, hash, parent, err := s.identify(source, t)
		if err != nil {
			return Session{}, err
		}
		if id == (affinity.Identity{}) {
			continue
		}
		tenant := affinity.Tenant{placeholder(r, s.Scope), req.Salt}
		found := Session{
			Key: s.Secret().Session(id, tenant, req.Model), Scope: s.Secret().Scope(tenant), Identity: id, Source: source.name,
			Held: held, Final: strings.EqualFold(t.header(nvext.HeaderSessionFinal), "true"), BackedOnly: s.HeldOnly && !held,
			Rendezvous: rendezvous(hash, tenant),
		}
		if parent != "" {
			found.Parent = s.Secret().Session(s.Secret().Identity(parent), tenant, req.Model)
		}
		if source.name == sourceNVExt {
			found.control(&ext.SessionControl)
			found.EngineSession = engine.SessionID(req.Salt, tenant[0], strings.TrimSpace(ext.Session()))
		}
		return found, nil
	}
	return Session{}, nil
}

// held returns the session that a client has opened in an engine itself, by its id there. It
// counts in every configuration, and for all models: an engine's own requests need not name one.
func (s *Sessions) held(r *http.Request, id, salt string) Session {
	tenant := affinity.Tenant{placeholder(r, s.Scope), salt}
	name := s.Secret().Identity("session_params " + id)
	return Session{
		Key: s.Secret().Session(name, tenant, ""), Scope: s.Secret().Scope(tenant), Identity: name,
		Source: "session_params", Held: true,
	}
}

// control applies the client's nvext.session_control, if there is one.
func (s *Session) control(c *nvext.SessionControl) {
	if c.SessionID == "" {
		return
	}
	s.Action = c.Action
	s.Final = s.Final || c.Action == nvext.ActionClose
	if c.Timed {
		s.TTL = c.Timeout
	}
}

// identify returns what a source says of a turn's session. Its identity is zero if the source
// names none. The client's key has a hash, which is 0 if the source does not tell the key. The
// key of the parent session is empty if there is none, or if it is the session's own.
func (s *Sessions) identify(source *KeySource, t turn) (id affinity.Identity, hash uint64, parent string, err error) {
	if source.find == nil {
		if response := t.req.PreviousResponse; response != "" && s.Conversation != nil {
			id, _ = s.Conversation(response)
		}
		return id, 0, "", nil
	}
	key, parent := source.find(t)
	if key == "" || strings.HasPrefix(key, cache.OwnSession) { // of a router before this one
		return id, 0, "", nil
	}
	if len(key) > maxSessionKey && source.name == sourceNVExt {
		return id, 0, "", &api.Refusal{
			API: t.req.API, Status: http.StatusBadRequest, Code: api.CodeSessionKey, Param: source.name,
			Err: fmt.Errorf("%s: a session key must have at most %d bytes", source.name, maxSessionKey),
		}
	}
	if parent == key {
		parent = ""
	}
	return s.Secret().Identity(key), xxh3.HashString(key), parent, nil
}

// rendezvous adds the tenant to the hash of a client's key. Routers have different secrets, so
// the hash is without one.
func rendezvous(hash uint64, of affinity.Tenant) uint64 {
	if hash == 0 {
		return 0
	}
	return xxh3.HashStringSeed(of[1], xxh3.HashStringSeed(of[0], hash))
}
