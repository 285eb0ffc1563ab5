package plan

import (
	"fmt"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"

	"github.com/caddyserver/caddy/v2"
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

// DefaultKeys are the places of a session's key if the operator names none. What names one
// conversation for certain comes first.
var DefaultKeys = []string{
	sourceNVExt,
	"header:" + nvext.HeaderSession, "header:X-Claude-Code-Session-Id", "header:Thread-Id",
	"header:X-Deepseek-Harness-Session-Id", "header:X-Session-Id",
	"body:prompt_cache_key", "body:metadata.user_id", "body:conversation", "body:previous_response_id",
}

const sourceNVExt = "nvext"

// KeySource is a place of a session's key.
type KeySource struct {
	name string // as the operator writes it
	// find returns the key, empty if there is none, and the key of the parent session. It is
	// nil for previous_response_id, which names a session only indirectly.
	find func(turn) (key, parent string)
}

// turn is a request that may be a turn of a session.
type turn struct {
	r   *http.Request
	req *api.Request
	ext *nvext.Ext
}

// header returns a header's value by its canonical name, trimmed.
func (t turn) header(name string) string {
	if values := t.r.Header[name]; len(values) > 0 {
		return strings.TrimSpace(values[0])
	}
	return ""
}

// members are the places in the body.
var members = map[string]func(turn) (key, parent string){
	"prompt_cache_key":     func(t turn) (string, string) { return t.req.CacheKey, "" },
	"session_id":           func(t turn) (string, string) { return t.req.SessionID, "" },
	"metadata.user_id":     func(t turn) (string, string) { return t.req.UserSession, "" },
	"conversation":         func(t turn) (string, string) { return t.req.Conversation, "" },
	"previous_response_id": nil,
}

// agent names the headers of a client that starts sub-agents.
type agent struct {
	session string
	child   string // a sub-agent's id within its session; empty if sub-agents have sessions
	parent  string // the parent's id: that of a sub-agent if there is child, else its session
}

// agents are the clients whose headers name a parent (Dynamo, lib/llm/src/protocols/agents.rs).
var agents = []agent{
	{nvext.HeaderSession, "", "X-Dynamo-Parent-Session-Id"},
	{"X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id", "X-Claude-Code-Parent-Agent-Id"},
	{"Thread-Id", "", "X-Codex-Parent-Thread-Id"},
	{"X-Deepseek-Harness-Session-Id", "", "X-Deepseek-Harness-Parent-Session-Id"},
	{"X-Session-Id", "", "X-Parent-Session-Id"},
}

// find returns the keys of the session and of its parent. The key of a sub-agent without a
// session of its own is the session's and the sub-agent's id.
func (a agent) find(t turn) (key, parent string) {
	key, parent = t.header(a.session), t.header(a.parent)
	if key == "" || a.child == "" {
		return key, parent
	}
	root, child := key, t.header(a.child)
	if child == "" {
		return root, ""
	}
	if parent == "" {
		return root + "/" + child, root
	}
	return root + "/" + child, root + "/" + parent
}

// ParseKeySource parses an operand of the operator's option.
func ParseKeySource(name string) (KeySource, error) {
	if name == sourceNVExt {
		return KeySource{name, func(t turn) (string, string) { return strings.TrimSpace(t.ext.Session()), "" }}, nil
	}
	if inner, ok := PlaceholderName(name); ok {
		return KeySource{name, func(t turn) (string, string) { return placeholder(t.r, inner), "" }}, nil
	}
	kind, of, _ := strings.Cut(name, ":")
	find, known := members[of]
	switch {
	case kind == "body" && known:
		return KeySource{name, find}, nil
	case of == "":
	case kind == "header":
		a := agent{session: textproto.CanonicalMIMEHeaderKey(of)}
		if i := slices.IndexFunc(agents, func(b agent) bool { return b.session == a.session }); i >= 0 {
			a = agents[i]
		}
		return KeySource{name, a.find}, nil
	case kind == "cookie":
		return KeySource{name, func(t turn) (string, string) { return cookie(t.r, of), "" }}, nil
	case kind == "query":
		return KeySource{name, func(t turn) (string, string) { return strings.TrimSpace(t.r.URL.Query().Get(of)), "" }}, nil
	}
	return KeySource{}, fmt.Errorf("affinity key: must be nvext, header:<name>, cookie:<name>, query:<name>, "+
		"{<placeholder>}, or body: with prompt_cache_key, session_id, metadata.user_id, conversation or "+
		"previous_response_id, got %q", name)
}

// PlaceholderName returns the name of a single placeholder in braces; ok is false for other
// texts.
func PlaceholderName(text string) (name string, ok bool) {
	name, opens := strings.CutPrefix(text, "{")
	name, closes := strings.CutSuffix(name, "}")
	return name, opens && closes && name != "" && !strings.ContainsAny(name, "{}")
}

// placeholder returns the value of a placeholder, trimmed; empty if it is unknown.
func placeholder(r *http.Request, name string) string {
	if name == "" {
		return ""
	}
	repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return ""
	}
	value, _ := repl.GetString(name)
	return strings.TrimSpace(value)
}

// cookie returns the first value of a cookie that is not empty.
func cookie(r *http.Request, name string) string {
	for _, c := range r.CookiesNamed(name) {
		if value := strings.TrimSpace(c.Value); value != "" {
			return value
		}
	}
	return ""
}
