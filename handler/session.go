package handler

import (
	"cmp"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// session is the session of which the request is a turn, by what the request says.
type session struct {
	key string // what its worker is remembered by; empty if there is no session
	// idle is how long it is remembered after this turn, if the client says.
	idle time.Duration
	last bool // it ends with this turn
	// held says that the engine itself holds the session's state.
	held bool
}

// The values of Affinity.Mode.
const (
	affinitySoft = "soft"
	affinityHard = "hard"
	affinityOff  = "off"
)

// checkAffinity checks the mode.
func (h *Handler) checkAffinity() error {
	switch mode := h.sessionMode(); mode {
	case affinitySoft, affinityHard, affinityOff:
		return nil
	default:
		return fmt.Errorf("affinity mode: must be soft, hard or off, got %q", mode)
	}
}

// priceLeaving records whether the policy may send the turns of a session elsewhere:
// only a policy whose costs are times knows the price.
func (h *Handler) priceLeaving() {
	h.dispatcher.soft = h.sessionMode() == affinitySoft && kvscore.CostUnit(h.policy) == kvscore.UnitMilliseconds
}

// sessionMode returns the configured mode, or the default.
func (h *Handler) sessionMode() string {
	if h.Affinity == nil {
		return affinitySoft
	}
	return cmp.Or(h.Affinity.Mode, affinitySoft)
}

// session returns the request's session. Long keys become a digest. The timeout and the
// close action of nvext count only if nvext also gives the session's key.
func (h *Handler) session(r *http.Request, req *api.Request, ext *nvext.Ext) session {
	for _, k := range h.keys {
		var key string
		var s session
		switch {
		case k.header != "":
			if values := r.Header[k.header]; len(values) > 0 {
				key = strings.TrimSpace(values[0])
			}
		case k.body != nil:
			key = k.body(req)
		default:
			key = ext.Session()
			if c := &ext.SessionControl; c.SessionID != "" {
				s.last = c.Action == nvext.ActionClose
				if c.Timed {
					s.idle = c.Timeout
				}
			}
		}
		if key != "" {
			s.held = req.SessionHeld || ext.SessionParams.ID != ""
			if h.sessionMode() == affinityOff && !s.held {
				return session{}
			}
			s.key = tenantKey(req.Salt, key)
			return s
		}
	}
	return session{}
}

// boundTo looks up and returns the target that the session is bound to, the zero
// Target if there is none.
func (rt *route) boundTo() (none kvscore.Target) {
	rt.session, rt.wait.away, rt.bound, rt.home = rt.plan.session.key, false, 0, 0
	if rt.session == "" {
		return none
	}
	b, ok := rt.pool.sessions.Peek(rt.session)
	rt.home = b.Version
	if ok && rt.servesOthers(b.Target) {
		// The session has several models, of which this one has another home.
		rt.session = modelKey(rt.session, rt.plan.model)
		b, ok = rt.pool.sessions.Peek(rt.session)
	}
	if !ok {
		return none
	}
	rt.bound, rt.seenAt, rt.keptFor = b.Version, b.Target, b.TTL
	return b.Target
}

// homeTarget returns the target that the session is bound to, the zero Target if there
// is none. boundTo has looked it up.
func (rt *route) homeTarget() (none kvscore.Target) {
	if rt.bound == 0 {
		return none
	}
	return rt.seenAt
}

// mayLeave tells whether the policy may send the request elsewhere than to the
// session's worker. Where the prompt is not known, the key is all there is to go by.
func (rt *route) mayLeave() bool {
	r := rt.plan.request
	return rt.soft && !rt.plan.session.held && r != nil && r.Kind != api.None
}

// servesOthers tells whether a target is an upstream that serves other models
// than the request's.
func (rt *route) servesOthers(t kvscore.Target) bool {
	if rt.model == "" {
		return false
	}
	for _, row := range rt.table(rt.offered).rows {
		if w := row.worker; w.id == t.Worker {
			return !w.isKnownToServe(rt.model)
		}
	}
	return false
}

// sessionTTL is how long the session is remembered after its last use.
func (rt *route) sessionTTL() time.Duration {
	if idle := rt.plan.session.idle; idle > 0 {
		return idle
	}
	if rt.bound != 0 {
		return rt.keptFor // as an earlier turn said, wherever it goes now
	}
	return rt.pool.settings.Load().ttl
}

// commit binds the session to the target that answers it, or refreshes its binding. A
// last turn changes no binding: endTurn removes it.
func (rt *route) commit() {
	if rt.session == "" || rt.plan.request == nil || rt.plan.session.last {
		return
	}
	if rt.wait.away {
		rt.pool.sessions.Get(rt.session) // its next turn is at home again
		return
	}
	target, idle := rt.attempt.lease.Target(), rt.plan.session.idle
	if rt.bound != 0 && rt.seenAt == target {
		b, ok := rt.pool.sessions.Get(rt.session)
		if rt.bound, rt.seenAt, rt.keptFor = b.Version, b.Target, b.TTL; ok && (idle == 0 || idle == b.TTL) {
			return
		}
		// It has just expired, or is to be kept for another time.
	}
	b, _, err := rt.pool.sessions.CompareAndSwap(rt.session, rt.bound, target, rt.sessionTTL(), affinity.RouterOnly)
	if err != nil {
		rt.fallBack(fallbackUnbound) // the store is full of others' sessions
		return
	}
	rt.bound, rt.seenAt, rt.keptFor = b.Version, b.Target, b.TTL
}

// endTurn ends the session's turn. The binding's time to live starts anew, or the
// client's last turn removes the bindings that the router saw when it chose. A newer
// binding stays. A request that reached no worker removes nothing: its client will
// repeat it.
func (rt *route) endTurn(computed bool) {
	switch {
	case rt.session == "":
	case rt.plan.session.last:
		rt.pool.sessions.Remove(rt.session, rt.bound)
		rt.pool.sessions.Remove(rt.plan.session.key, rt.home)
	case computed:
		rt.pool.sessions.Get(rt.session)
	}
}
