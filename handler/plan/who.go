package plan

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"

	"github.com/caddyserver/caddy/v2"
)

// Who is who a request comes from, and what it was promised.
type Who struct {
	Class  *queue.Class // nil is the zero class
	Tenant Tenant
	TTFT   time.Duration // the target of the time to the first token; 0: none
	// Backups are the ids of the backups that may get the request.
	Backups []uint64
}

// ClassName returns the name of the request's class, empty for the zero class.
func (w *Who) ClassName() string {
	if w.Class == nil {
		return ""
	}
	return w.Class.Name
}

// Tenant is who pays for a request. The zero Tenant is that of all requests that name none.
type Tenant struct {
	Name string
	Hash uint64 // of the name, the same in all routers
}

// maxTenant is the longest name of a tenant that is kept as it is, in bytes.
const maxTenant = 128

// TenantOf returns the tenant of a name. A digest replaces a long one.
func TenantOf(name string) Tenant {
	if name == "" {
		return Tenant{}
	}
	name = kept(name, maxTenant)
	return Tenant{name, quota.Hash(name)}
}

func (rd *Reader) identifyClient(r *http.Request, p *Plan) {
	switch {
	case rd.Tenant != "":
		p.Tenant = TenantOf(placeholder(r, rd.Tenant))
	case p.Ext.Tenant != "":
		p.Tenant = TenantOf(p.Ext.Tenant)
	default:
		p.Tenant = TenantOf(placeholder(r, rd.Sessions.Scope))
	}
	backups := rd.Backups != nil && p.mayOverflow()
	if rd.Class == nil && !backups {
		return
	}
	if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Map(p.Placeholder)
	}
	if rd.Class != nil {
		rd.classify(r, p)
	}
	if backups {
		p.Backups = rd.Backups(r)
	}
}

// overflowing are the APIs that providers have, too.
var overflowing = []string{api.NameChat, api.NameCompletions, api.NameResponses, api.NameMessages, api.NameEmbeddings, api.NameRerank}

// mayOverflow returns whether a backup may serve the request. It is of a provider's API, names no worker, and is
// not a part of what an engine holds.
func (p *Plan) mayOverflow() bool {
	return p.Request != nil && slices.Contains(overflowing, p.API.Name()) && !p.Pin.Named && !p.Pin.Rank.Set && !p.Constrained() && !p.Ext.QueryOnly() &&
		!p.Session.Held && !p.Session.Opens()
}

func (rd *Reader) classify(r *http.Request, p *Plan) {
	var from string
	if p.Class, from = rd.Class(r); p.Class != nil {
		p.TTFT = p.Class.TTFT
	}
	if from != "" {
		if own := parseTarget(placeholder(r, from)); own > 0 {
			p.TTFT = own
		}
	}
}

// longestTarget is the longest time to the first token that a client may name.
const longestTarget = time.Hour

// parseTarget parses a client's target of the time to the first token: milliseconds, or a duration
// with its unit. It returns 0 if there is none.
func parseTarget(text string) time.Duration {
	target, err := time.ParseDuration(text)
	if ms, noNumber := strconv.ParseFloat(text, 64); noNumber == nil && ms <= float64(longestTarget/time.Millisecond) {
		target, err = time.Duration(ms*float64(time.Millisecond)), nil
	}
	if err != nil || target < time.Millisecond || target > longestTarget {
		return 0
	}
	return target
}

// Placeholder returns the value of one of our placeholders that the request alone determines.
func (p *Plan) Placeholder(key string) (any, bool) {
	name, _ := strings.CutPrefix(key, "http.kv_router.")
	switch name {
	case key: // not ours
	case "model":
		return p.Named(), true
	case "priority":
		return p.Ext.AgentHints.PriorityJump(), true
	case "tenant":
		return p.Tenant.Name, true
	case "class":
		return p.ClassName(), true
	}
	return nil, false
}
