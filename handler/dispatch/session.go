package dispatch

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/tidwall/gjson"
)

// stayAt makes the target whose engine holds the session the only one. A turn that opens the
// session again may go elsewhere if that worker cannot be used, and a last one if the client
// says so.
func (rt *route) stayAt(at kvscore.Target) error {
	rt.lookUp()
	p, w := rt.plan, rt.offers.Worker(at.Worker)
	switch {
	case p.Session.Opens() && (w == nil || !w.TakesRequests(rt.ready)):
		rt.turn.Leave()
		return nil
	case w == nil && rt.Pool.IsNowUpstream(at.Worker):
		return &api.Refusal{
			API: p.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, RetryAfter: 1,
			Err: fmt.Errorf("worker %d, whose engine holds the session, is not offered now; try again later", at.Worker),
		}
	case w == nil:
		return rt.turn.Gone()
	}
	if e := w.Engine(); !e.HoldsSessions(p.Name) {
		return turn.NotOpened(p, http.StatusBadRequest,
			fmt.Errorf("the engine of worker %d holds the session, but not in the API %s", w.ID, p.Name))
	}
	if p.Pin.Named && p.Pin.Worker != w.ID || p.Pin.Rank.Set && p.Pin.Rank.Value != at.Rank {
		if !p.Session.Final {
			return rt.badPin("nvext: the session is on worker %d, rank %d, whose engine holds it", w.ID, at.Rank)
		}
		rt.turn.Leave()
		return nil
	}
	if want := rt.Wants(); !rt.Pool.Isolates(&want, w) {
		return rt.shared("not the engine with the session")
	}
	rt.fixed = fixed{worker: w, rank: nvext.Some(at.Rank), reason: ReasonSession}
	return nil
}

// homed returns whether the session has a home.
func (rt *route) homed() bool {
	home, _ := rt.turn.Home()
	return home != kvscore.Target{}
}

// fullHome returns the session's worker if that is full and the operator wants the turn to wait
// for it; nil otherwise.
func (rt *route) fullHome(c *pool.Candidates) *pool.Worker {
	home, _ := rt.turn.Home()
	if !rt.Sessions.Hard || rt.pinned() {
		return nil
	}
	return fullOf(c, home)
}

// fullOf returns the worker of a target if that is left out only because it is full; nil
// otherwise.
func fullOf(c *pool.Candidates, t kvscore.Target) *pool.Worker {
	i := slices.IndexFunc(c.Full, func(w *pool.Worker) bool { return w.ID == t.Worker })
	if i < 0 {
		return nil
	}
	return c.Full[i]
}

// excluded returns whether the client's constraints, which hold for this request only, exclude a
// target that is still an upstream.
func (rt *route) excluded(t kvscore.Target) bool {
	if !rt.plan.Constrained() {
		return false
	}
	w, want := rt.offers.Worker(t.Worker), rt.Wants()
	return w != nil && rt.Pool.Meets(&want, w) != pool.Fits
}

// boundPosition returns the position of the target that the pin or the session decides on; -1
// if the policy chooses.
func (rt *route) boundPosition(c *pool.Candidates) int {
	home, priced := rt.turn.Home()
	if rt.pinned() {
		if len(c.Targets) != 1 {
			return -1 // the policy chooses among the ranks
		}
		if rt.homed() && home != c.Targets[0].Target {
			rt.turn.GoAway()
		}
		return 0
	}
	if !rt.homed() {
		return -1
	}
	if fullOf(c, home) != nil || rt.excluded(home) { // for this request only
		rt.turn.GoAway()
	}
	if priced {
		return -1
	}
	if rt.turn.Crowded() {
		rt.turn.GoAway()
		return -1
	}
	return slices.IndexFunc(c.Targets, func(t kvscore.TargetRef) bool { return t.Target == home })
}

// Holds returns whether the engine of the worker holds the session's state. Its turns send only
// what is new, so they are no prompts of the cache model, and their counts show nothing of it.
func (rt *route) Holds() bool {
	return rt.plan.Session.Held || rt.plan.Session.Opens() || rt.turn.EngineSession() != ""
}

// forgetPrompt makes the prompt of a turn unknown that is only a part of what the engine has.
func (rt *route) forgetPrompt() {
	if score := &rt.plan.Score; rt.Holds() {
		score.Blocks, score.Past, score.Identities = nil, 0, nil
	}
}

// bindOpened binds the session that a client has opened in the engine itself. The answer has its
// id.
func (d *Dispatch) bindOpened(ctx context.Context, resp *http.Response) {
	a, p := d.attempt, d.plan
	if p.Opened == nil || resp.StatusCode != http.StatusOK || body.Compressed(resp.Header) {
		return
	}
	const most = 16 << 10
	begin, err := io.ReadAll(io.LimitReader(resp.Body, most))
	resp.Body = &response.Replayed{ReadCloser: resp.Body, Begin: begin, Err: err}
	if id := gjson.ParseBytes(begin); id.Type == gjson.String && id.Str != "" {
		s := p.Opened(id.Str)
		d.turn.Opened(ctx, &s, a.Target)
	}
	if !p.Session.Key.IsZero() { // the engine may have got the client's id with its tenant's
		d.turn.Opened(ctx, &p.Session, a.Target)
	}
}

// commit binds the session to the target of a good answer. It counts what became of the session,
// and says it in the response headers.
func (d *Dispatch) commit(ctx context.Context, resp *http.Response) {
	a := d.attempt
	home, _ := d.turn.Home()
	good := resp.StatusCode < 300
	d.bindOpened(ctx, resp)
	state := d.turn.Commit(ctx, a.Target, good)
	if good && d.turn.EngineSession() != "" { // opened by this request: no other worker may serve it from now on
		d.fixed = fixed{worker: a.Worker, rank: nvext.Some(a.Target.Rank), reason: ReasonSession}
	}
	if state == turn.None {
		return
	}
	d.PoolMetrics.turns[state].Inc()
	if state == turn.Moved {
		d.Metrics.moves.WithLabelValues(d.Pool.Name, d.whyMoved(home)).Inc()
	}
	if d.Labels != "" {
		resp.Header.Set(d.Labels+"Session-Source", d.plan.Session.Source)
		resp.Header.Set(d.Labels+"Session-State", string(state))
	}
}

// Reasons why a session moved from its home.
const (
	movedGone        = "gone"        // home is no upstream any more
	movedFailed      = "failed"      // home failed to serve this turn
	movedUnavailable = "unavailable" // home is marked down, hung or draining
	movedCost        = "cost"        // another target was cheaper, and home holds little of the prompt
	movedContext     = "context"     // the prompt has outgrown home's context
)

// whyMoved returns why the session moved from its home.
func (d *Dispatch) whyMoved(home kvscore.Target) string {
	w := d.offers.Worker(home.Worker)
	switch {
	case w == nil:
		return movedGone
	case w == d.attempt.Worker: // another rank
		return movedCost
	case d.outgrew(w), d.beyond > 0 && slices.Contains(d.unfit, w):
		return movedContext
	case slices.Contains(d.tried, w):
		return movedFailed
	case !w.TakesRequests(d.attempt.Begun):
		return movedUnavailable
	}
	return movedCost
}
