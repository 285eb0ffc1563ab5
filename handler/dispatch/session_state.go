package dispatch

import "net/http"

// States of a session, as the response headers show them.
const (
	stateNew     = "new"     // this turn binds it
	stateBound   = "bound"   // this turn is at home
	stateAway    = "away"    // this turn is elsewhere, and the session stays bound to its home
	stateMoved   = "moved"   // this turn binds it to another target
	stateUnbound = "unbound" // it has no binding, and this turn makes none
	stateFinal   = "final"   // its binding ends with this turn
)

// sessionState returns what an answer of this status makes of the session, before commit;
// empty if there is no session.
func (d *Dispatch) sessionState(a *attempt, status int) string {
	switch {
	case d.session == "" || d.plan.Request == nil:
		return ""
	case d.plan.Session.Final:
		return stateFinal
	case d.bound != 0 && d.seenAt == a.Target:
		return stateBound
	case d.bound != 0 && (d.away || status >= 300):
		return stateAway
	case d.bound != 0:
		return stateMoved
	case status >= 300:
		return stateUnbound
	}
	return stateNew
}

// labelSession adds the response headers that show the session.
func (d *Dispatch) labelSession(h http.Header, state string) {
	if d.Labels == "" || state == "" {
		return
	}
	if state == stateNew && d.bound == 0 {
		state = stateUnbound // the store was full
	}
	h.Set(d.Labels+"Session-Source", d.plan.Session.Source)
	h.Set(d.Labels+"Session-State", state)
}
