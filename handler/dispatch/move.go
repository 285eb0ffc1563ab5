package dispatch

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"go.uber.org/zap"
)

// Move implements response.Mover. The rest is asked for as an ordinary attempt: with a lease, in
// the queue, within the retry budget.
func (o *delivery) Move(why error, a *api.Answer) *response.Rest {
	d := o.d
	ctx := d.proxied.Context()
	if ctx.Err() != nil {
		return nil
	}
	refused := errors.Is(why, resume.ErrExact) // by an endpoint of the engine's
	if refused {
		a.LoseIDs()
	}
	failed := o.phases.BrokeBefore(why)
	switch {
	case errors.Is(why, io.EOF) && a.Done() && !o.attempt.Worker.Engine().Closes(): // it is an end
		return nil
	case d.aborted():
		o.told = true // it is not the worker's fault
		o.Stays()
		return nil
	case errors.Is(why, response.ErrAborted) && failed == nil && !o.leaving(ctx):
		o.Stays()
		return nil
	}
	rest, reason := o.rest(a)
	misfit := errors.Is(why, response.ErrMisfit)
	if misfit {
		o.d.refused(tooLong)
	}
	drained := misfit || errors.Is(why, attempt.ErrDrained) // the worker is well
	if reason == "" && !a.FirstToken() && !drained && failed == nil {
		if d.lastSuspect() {
			reason = resume.StaysTries
		}
		d.suspects++
	}
	charged := o.attempt.Stay() // by the pool, to the budget
	if reason != "" {
		if !misfit {
			o.refuseMove(reason)
		}
		o.told = o.told || refused // it is not the worker's fault
		return nil
	}
	left, old := o.attempt, o.attempt.Worker
	if failed != nil {
		left.Uncounted() // its worker is well
		d.retryPhases(failed)
	}
	if rest.Way != api.WayWhole {
		d.split.KeepWhole("its stream goes on elsewhere") // no prefill leg has the text so far
	}
	if failed != nil || refused {
		old, drained = nil, true // the decode worker is well, or may go on otherwise
	}
	if o.told = true; !drained {
		shown := o.attempt.Shows(pool.OutcomeBroken, "stream broke: "+why.Error())
		if errors.Is(why, response.ErrEvent) {
			shown = o.attempt.Errored(errorWithin, false)
			if !a.FirstToken() {
				o.attempt.Failed(time.Now())
			}
		}
		d.Pool.Report(o.attempt.Worker, shown)
	}
	d.leave(a.FirstToken(), nil)
	way := rest.Way
	var part *response.Rest
	patience := budgetPatience
	if errors.Is(why, response.ErrEvent) {
		patience = 0 // the client can have the event at once
	}
	if reason = resume.StaysBudget; charged || misfit || o.awaitBudget(ctx, patience) {
		part, reason = o.goOn(ctx, rest, old, drained)
		if reason == resume.NotExact {
			a.LoseIDs()
			if rest, reason = o.rest(a); reason == "" {
				way = rest.Way
				part, reason = o.goOn(ctx, rest, old, drained)
			}
		}
	}
	if part == nil && ctx.Err() != nil {
		return nil // the client has left
	}
	cause, outcome := resume.Cause(why), "ok"
	switch {
	case part == nil:
		outcome = "failed"
		o.refuseMove(reason)
	case errors.Is(why, attempt.ErrDrained):
		left.End(pool.AttemptDrained, false)
	default:
		left.End(pool.AttemptResumed, !drained)
	}
	if part != nil {
		way = d.Rest.Way // also the end of one
	}
	d.Metrics.resumed.WithLabelValues(d.Pool.Name, cause, way, outcome).Inc()
	d.Trace.Resumed(d.attempt, cause, way, outcome)
	return part
}

func (o *delivery) refuseMove(reason string) {
	d := o.d
	d.Metrics.stayed.WithLabelValues(d.Pool.Name, reason).Inc()
	d.Pool.Incidents.Raise(time.Now(), "streams break that cannot go on at other workers", d.Pool.Logger)
}

// rest returns how to ask for the rest of the stream, or the reason why it stays.
func (o *delivery) rest(a *api.Answer) (*api.Rest, string) {
	d := o.d
	switch {
	case o.noRoom:
		return nil, api.StaysMemory
	case a.Stays() != "":
		return nil, a.Stays()
	case o.moved >= d.Resume.Tries:
		return nil, resume.StaysTries
	case d.Body == nil:
		return nil, resume.StaysEngine // see begin
	}
	rest, reason := a.Rest(d.Body.Data)
	if reason == "" && !rest.Fits(d.plan.Request.Editor(d.Body.Data)) {
		reason = api.StaysPrompt
	}
	return rest, reason
}

// goOn asks other workers for the rest until one gives it, or returns the reason why none does.
// drained: the worker so far is well, and so is its host.
// old is the worker so far, nil if it may serve the rest.
func (o *delivery) goOn(ctx context.Context, rest *api.Rest, old *pool.Worker, drained bool) (*response.Rest, string) {
	d := o.d
	r := &remainder{delivery: o, rest: rest, left: mostAttempts}
	if !drained {
		r.apart = o.attempt.Worker
	}
	var reason string
	if r.failed, reason = resume.Without(d.offers, old, d.plan.API.Name(), rest.Way); reason != "" {
		return nil, reason
	}
	d.Rest = rest
	resp, err := d.run(ctx, r)
	switch {
	case err == nil:
		o.arrive(ctx, d.attempt, drained)
		return &response.Rest{From: resp.Body, Ctx: d.attempt.Context(), Joint: rest.Joint}, ""
	case r.refused:
		reason = resume.NotExact
	default:
		reason = resume.StaysNoWorker
	}
	if a := d.attempt; a != o.attempt {
		outcome := pool.AttemptRetried
		if ctx.Err() != nil {
			outcome = outcomeClientGone
		}
		a.End(outcome, !r.blameless)
	}
	return nil, reason
}

// arrive records that the stream goes on with an attempt.
func (o *delivery) arrive(ctx context.Context, a *attempt.Attempt, drained bool) {
	d := o.d
	o.attempt, o.phases, o.told = a, d.phases, false
	o.moved++
	o.before, o.waits, o.alive = o.tokens, false, time.Time{}
	state := d.turn.Commit(ctx, a.Target, true)
	if state == turn.Moved {
		why := movedFailed
		switch {
		case d.beyond > 0:
			why = movedContext
		case drained:
			why = movedUnavailable
		}
		d.Metrics.moves.WithLabelValues(d.Pool.Name, why).Inc()
	}
	if d.beyond == 0 {
		d.Pool.Incidents.Raise(time.Now(), "streams break off, and go on at other workers", d.Pool.Logger)
	}
	if c := d.Logger.Check(zap.DebugLevel, "stream goes on at another worker"); c != nil {
		c.Write(zap.String("upstream", a.Worker.Dial), zap.Int("moves", o.moved))
	}
}

// budgetPatience is how long a stream waits for room in the retry budget. Many streams break at once
// when their engine dies.
const budgetPatience = time.Minute

// awaitBudget charges a move to the retry budget, once that has room.
func (o *delivery) awaitBudget(ctx context.Context, patience time.Duration) bool {
	d := o.d
	for begun := time.Now(); ; {
		b := d.Pool.Settings.Load().RetryBudget
		spent := d.Pool.Spending.Spent(time.Now(), b)
		if !spent || *b == (pool.RetryBudget{}) || time.Since(begun) >= patience {
			return d.Pool.MayRetry(time.Now())
		}
		timer := time.NewTimer(100 * time.Millisecond)
		select {
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-timer.C:
		}
	}
}

const (
	// leavingFor is how long an engine that shuts down may still answer after it has aborted its
	// requests. It is asked each leavingPause.
	leavingFor, leavingPause = time.Second, 200 * time.Millisecond
	// answerTime is how long its answer may take.
	answerTime = time.Second
)

// leaving returns whether the attempt's worker is marked down, drains, is gone or shuts down. Other
// workers abort a request because somebody wants that.
func (o *delivery) leaving(ctx context.Context) bool {
	for end := time.Now().Add(leavingFor); ; {
		if o.left(ctx) {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		timer := time.NewTimer(leavingPause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-timer.C:
		}
	}
}

// left is leaving, as of now. A worker that is slow to answer has not left.
func (o *delivery) left(ctx context.Context) bool {
	d, w := o.d, o.attempt.Worker
	d.offers, _ = d.Renew()
	offered := slices.ContainsFunc(d.offers.Table.Rows, func(r pool.TableRow) bool { return r.Worker == w })
	h := w.Health.State(time.Now())
	if !offered || !d.Pool.IsUpstream(d.Pool.Settings.Load(), w) || w.Draining() || w.IsHung() || h.Away || !h.Until.IsZero() {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	status, _, err := d.Client.Fetch(ctx, w.Dial, http.MethodGet, "/v1/models", nil, nil, 1<<20)
	return status >= http.StatusInternalServerError || status == 0 && err != nil && ctx.Err() == nil
}
