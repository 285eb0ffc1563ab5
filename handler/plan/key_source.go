package plan

import (
	"fmt"
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"

	"github.com/caddyserver/caddy/v2"
)

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
