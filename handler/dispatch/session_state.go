package dispatch

import (
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// States of a session, as the response headers show them.
const (
	stateNew     = "new"     // this turn binds it
	stateBound   = "bound"   // this turn is at home
	stateAway    = "away"    // this turn is elsewhere, and the session stays bound to its home
	stateMoved   = "moved"   // this turn binds it to another target
	stateUnbound = "unbound" // it has no binding, and this turn makes none
	stateFinal   = "final"   // its binding ends with this turn
)

// sessionState returns what an answer made of the session, after commit; empty if there is no
// session. had is the session's target before, the zero Target if it had none. A session
// whose concurrent first request has chosen a target has that.
func (d *Dispatch) sessionState(had kvscore.Target) string {
	at := d.attempt.Target
	switch {
	case d.session.IsZero() || d.plan.Request == nil:
		return ""
	case d.plan.Session.Final:
		return stateFinal
	case d.bound.Version == 0:
		return stateUnbound
	case d.bound.Target != at:
		return stateAway
	case had == at:
		return stateBound
	case had != (kvscore.Target{}):
		return stateMoved
	}
	return stateNew
}

// labelSession adds the response headers that show the session.
func (d *Dispatch) labelSession(h http.Header, had kvscore.Target) {
	if d.Labels == "" {
		return
	}
	if state := d.sessionState(had); state != "" {
		h.Set(d.Labels+"Session-Source", d.plan.Session.Source)
		h.Set(d.Labels+"Session-State", state)
	}
}
