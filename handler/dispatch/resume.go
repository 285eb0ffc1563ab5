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
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
)

// moves are the moves of a stream from worker to worker.
type moves struct {
	moved  int   // how often it has moved
	before int   // events with tokens before the last move
	told   bool  // the pool knows that its attempt has ended
	noRoom bool  // its body was not kept
	room   int64 // bytes that are reserved for its text
}

// mayGoOn returns whether the request's stream may go on elsewhere.
func (d *Dispatch) mayGoOn() bool {
	return !d.Resume.IsOff() && d.plan.Request != nil && d.plan.Request.Stream && d.plan.Once == nil && d.plan.Repeatable &&
		!d.plan.Given && !d.pinned() && !d.Holds() && len(d.offers.Ups) > 1
}

// goesOn is mayGoOn, and returns whether the body for it is there.
func (d *Dispatch) goesOn() bool { return d.Body != nil && d.mayGoOn() }

// movesLeft returns whether a stream that arrives now may move again.
func (o *delivery) movesLeft() bool { return o == nil || o.moved+1 < o.d.Resume.Tries }

// keepsBody returns whether the body is kept while the answer streams. Bodies of streams have
// half of the memory for bodies, so that there is room for those of new requests.
func (d *Dispatch) keepsBody(resp *http.Response) bool {
	a := d.attempt
	return a.Streams(resp) && !body.Compressed(resp.Header) && resp.ContentLength < 0 && d.goesOn() &&
		d.Pool.Memory.Held.Load() <= body.MaxBytes()/2
}

// freeBody frees the body, unless something else needs it.
func (d *Dispatch) freeBody() {
	if !d.KeepBody && d.followUp == nil {
		d.dropBody()
	}
}

// Track implements response.Mover.
func (o *delivery) Track(a *api.Answer) {
	d := o.d
	if o.noRoom = d.Body == nil; o.noRoom {
		return
	}
	memory := &d.Pool.Memory.Held
	a.Track(d.Body.Data, d.Resume.Tokens, d.exact, func(n int) bool {
		o.room += int64(n)
		return memory.Add(int64(n)) <= body.MaxBytes()
	})
}

// free frees what was reserved for the text.
func (o *delivery) free() {
	o.d.Pool.Memory.Held.Add(-o.room)
	o.room = 0
}

// Stays implements response.Mover.
func (o *delivery) Stays() {
	o.attempt.Stay()
	o.d.freeBody()
}

// begin is called with the stream's first token. The rest of a stream without one can come from
// any engine.
func (o *delivery) begin() {
	d := o.d
	if d.Body == nil || !d.mayGoOn() {
		return
	}
	if !resume.IsPossible(d.offers, o.attempt.Worker, d.plan.API.Name(), d.exact) {
		o.Stays()
	}
}

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
