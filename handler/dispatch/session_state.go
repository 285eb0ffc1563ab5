package dispatch

import (
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// States of a session, as the response headers and the metric show them.
const (
	stateNew     = "new"     // this turn binds it
	stateBound   = "bound"   // this turn is at home
	stateAway    = "away"    // this turn is elsewhere, and the session stays bound to its home
	stateMoved   = "moved"   // this turn binds it to another target
	stateUnbound = "unbound" // it has no binding, and this turn makes none
	stateFinal   = "final"   // its binding ends with this turn
)

var sessionStates = []string{stateNew, stateBound, stateAway, stateMoved, stateUnbound, stateFinal}

// sessionState returns what an answer made of the session, after commit; empty if there is no
// session. had is the session's target before, the zero Target if it had none. A session
// whose concurrent first request has chosen a target has that.
func (d *Dispatch) sessionState(had kvscore.Target) string {
	at := d.attempt.Target
	switch {
	case d.plan.Session.Key.IsZero() || d.plan.Request == nil:
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

// noticeSession counts what an answer made of the session, and says it in the response headers.
// had is as for sessionState.
func (d *Dispatch) noticeSession(h http.Header, had kvscore.Target) {
	state := d.sessionState(had)
	if state == "" {
		return
	}
	d.Figures.turns[state].Inc()
	if state == stateMoved {
		d.Metrics.moves.WithLabelValues(d.Pool.Name, d.whyMoved(had)).Inc()
	}
	if d.Labels != "" {
		h.Set(d.Labels+"Session-Source", d.plan.Session.Source)
		h.Set(d.Labels+"Session-State", state)
	}
}

// Reasons why a session moved from its home.
const (
	movedGone        = "gone"        // home is no upstream any more
	movedFailed      = "failed"      // home failed to serve this turn
	movedUnavailable = "unavailable" // home is marked down, hung or draining
	movedCost        = "cost"        // another target was cheaper, and home holds little of the prompt
)

// whyMoved returns why the session moved from its home.
func (d *Dispatch) whyMoved(home kvscore.Target) string {
	w := d.offers.Worker(home.Worker)
	switch {
	case w == nil:
		return movedGone
	case w == d.attempt.Worker: // another rank
		return movedCost
	case slices.Contains(d.tried, w):
		return movedFailed
	case !w.TakesRequests(d.attempt.Begun):
		return movedUnavailable
	}
	return movedCost
}
