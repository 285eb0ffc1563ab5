package dispatch

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/tidwall/gjson"
	"go.uber.org/zap"
)

// remainder is the rest of a stream that broke off. Other workers are asked for it.
type remainder struct {
	*delivery
	answer *api.Answer // that broke off
	rest   *api.Rest
	why    error        // it broke off
	pair   *split.Error // the pair of workers failed; nil if it did not
	unable bool         // an endpoint of the engine's refuses to go on by ids
	well   bool         // the worker so far is well, and so is its host

	failed    []*worker.Worker // that cannot give it, or have not
	triesLeft int              // attempts that may follow
	exact     bool             // the latest attempt asks for it by the ids of tokens
	refused   bool             // an engine cannot go on with the ids of the answer's tokens
	blameless bool             // the latest attempt failed by no fault of its worker
}

// Move implements response.Mover. The rest is asked for as an ordinary attempt: with a lease, in
// the queue, within the retry budget.
func (o *delivery) Move(why error, a *api.Answer) *response.Rest {
	d, from := o.d, o.attempt
	ctx := d.proxied.Context()
	if ctx.Err() != nil {
		return nil
	}
	r := &remainder{delivery: o, answer: a, why: why, pair: o.phases.BrokeBefore(why), unable: errors.Is(why, resume.ErrExact)}
	misfit, drained := errors.Is(why, response.ErrMisfit), errors.Is(why, attempt.ErrDrained)
	r.well = misfit || drained
	if r.unable {
		a.LoseIDs()
	}
	if r.ends(ctx) {
		return nil
	}
	reason := r.find()
	if misfit {
		d.refused(tooLong)
	}
	if reason == "" && !a.FirstToken() && !r.well && r.pair == nil {
		if d.lastSuspect() {
			reason = resume.NotResumableTries
		}
		d.suspects++
	}
	charged := from.ForbidMove() || misfit // by the pool, to the budget; or free
	if reason != "" {
		if !misfit {
			o.refuseMove(reason)
		}
		o.reported = o.reported || r.unable // it is not the worker's fault
		return nil
	}
	r.leave()
	way := r.rest.Way
	part, reason := r.ask(ctx, charged)
	if part == nil && ctx.Err() != nil {
		return nil // the client has left
	}
	if r.rest != nil {
		way = r.rest.Way // ask may have changed it
	}
	outcome := "ok"
	switch {
	case part == nil:
		outcome = "failed"
		o.refuseMove(reason)
	case drained:
		from.CountOutcome(observe.AttemptDrained, false)
	default:
		from.CountOutcome(observe.AttemptResumed, !r.well)
	}
	cause := resume.Cause(why)
	resumedTotal.WithLabelValues(d.Pool.Name, cause, way, outcome).Inc()
	d.Trace.Event("resume", d.attempt, [2]string{"cause", cause}, [2]string{"way", way}, [2]string{"outcome", outcome})
	return part
}

// ends returns whether a stream ends here, as somebody wants it or as its engine means it.
func (r *remainder) ends(ctx context.Context) bool {
	switch d := r.d; {
	case errors.Is(r.why, io.EOF) && r.answer.Done() && !r.attempt.Worker.Engine().Closes(): // it is an end
	case d.Body != nil && d.Pool.Aborts.Has(time.Now(), d.start, cmp.Or(nameOf(d.Body.Data), d.plan.ID)):
		r.reported = true // it is not the worker's fault
		r.PinStream()
	case errors.Is(r.why, response.ErrAborted) && r.pair == nil && !r.leaving(ctx):
		r.PinStream()
	default:
		return false
	}
	return true
}

// nameOf returns the id by which another request may abort one, by its body; empty if it has none.
func nameOf(body []byte) string {
	ids := gjson.GetManyBytes(body, "rid", "request_id")
	return cmp.Or(ids[0].Str, ids[1].Str)
}

// find finds out how to ask for the rest, or returns the reason why the stream cannot go on.
func (r *remainder) find() (reason string) {
	d := r.d
	switch r.rest = nil; {
	case r.noRoom:
		return api.NotResumableMemory
	case r.answer.WhyNotResumable() != "":
		return r.answer.WhyNotResumable()
	case r.moved >= d.Resume.Tries:
		return resume.NotResumableTries
	case d.Body == nil:
		return resume.NotResumableEngine // see FirstToken
	}
	r.rest, reason = r.answer.Rest(d.Body.Data)
	if reason == "" && !r.rest.Fits(d.plan.Request.Editor(d.Body.Data)) {
		reason = api.NotResumablePrompt
	}
	return reason
}

// leave ends the attempt of a stream that moves, and reports what it has shown of its worker.
func (r *remainder) leave() {
	d, a := r.d, r.attempt
	if r.pair != nil {
		a.CountOutcome("", false) // its worker is well
		d.retryPhases(r.pair)
	}
	if r.rest.Way != api.WayWhole {
		d.split.KeepWhole("its stream goes on elsewhere") // no prefill phase has the text so far
	}
	r.well = r.well || r.pair != nil || r.unable
	if r.reported = true; !r.well {
		shown := a.Shows(worker.OutcomeBroken, "stream broke: "+r.why.Error())
		if errors.Is(r.why, response.ErrEvent) {
			shown = a.Errored(errorWithin, false)
			if !r.answer.FirstToken() {
				a.Failed(time.Now(), r.answer.ErrorStatus())
			}
		}
		d.Pool.Report(a.Worker, shown)
	}
	d.endAttempt(r.answer.FirstToken())
}

// ask asks for the rest once the retry budget allows it. If no engine goes on by ids, it asks for it
// otherwise.
func (r *remainder) ask(ctx context.Context, charged bool) (part *response.Rest, reason string) {
	patience := budgetPatience
	if errors.Is(r.why, response.ErrEvent) {
		patience = 0 // the client can have the event at once
	}
	if !charged && !awaitBudget(ctx, r.d.Pool, patience) {
		return nil, resume.NotResumableBudget
	}
	if part, reason = r.goOn(ctx); reason != resume.NotExact {
		return part, reason
	}
	r.answer.LoseIDs()
	if reason = r.find(); reason == "" {
		part, reason = r.goOn(ctx)
	}
	return part, reason
}

func (o *delivery) refuseMove(reason string) {
	d := o.d
	notResumedTotal.WithLabelValues(d.Pool.Name, reason).Inc()
	d.Pool.Raise(time.Now(), "streams break that cannot go on at other workers", o.attempt.Worker.Past.LastFailure())
}

// goOn asks other workers for the rest until one gives it, or returns the reason why none does. The attempt that
// gives it becomes the stream's.
func (r *remainder) goOn(ctx context.Context) (*response.Rest, string) {
	d, o, old := r.d, r.delivery, r.attempt.Worker
	excluded := old
	if r.pair != nil || r.unable {
		excluded = nil // the decode worker is well, or may go on otherwise
	}
	var reason string
	if r.failed, reason = resume.Without(d.offers, excluded, d.plan.API.Name(), r.rest.Way); reason != "" {
		return nil, reason
	}
	r.triesLeft, r.refused, r.blameless = mostAttempts, false, false
	d.Rest = r.rest
	resp, err := d.run(ctx, r) //nolint:bodyclose // the stream's reader closes it
	if err != nil {
		if d.attempt != o.attempt {
			outcome := observe.AttemptRetried
			if ctx.Err() != nil {
				outcome = outcomeClientGone
			}
			d.attempt.CountOutcome(outcome, !r.blameless)
		}
		if r.refused {
			return nil, resume.NotExact
		}
		return nil, resume.NotResumableNoWorker
	}
	o.attempt, o.phases, o.reported = d.attempt, d.phases, false
	o.moved++
	o.before, o.waits, o.alive = o.tokens, false, time.Time{}
	if d.turn.Commit(o.attempt.Target, true) == turn.Moved {
		why := movedFailed
		switch {
		case d.beyond > 0:
			why = movedContext
		case r.well:
			why = movedUnavailable
		}
		movesTotal.WithLabelValues(d.Pool.Name, why).Inc()
	}
	if d.beyond == 0 && !errors.Is(r.why, attempt.ErrDrained) {
		d.Pool.Raise(time.Now(), "streams break off, and go on at other workers", old.Past.LastFailure())
	}
	if c := d.Logger.Check(zap.DebugLevel, "stream goes on at another worker"); c != nil {
		c.Write(zap.String("upstream", o.attempt.Worker.Dial), zap.Int("moves", o.moved))
	}
	name := attempt.PublicName(d.plan, o.attempt.Worker)
	return &response.Rest{From: resp.Body, Ctx: o.attempt.Context(), Splicer: r.rest.Splicer, Name: name}, ""
}

// budgetPatience is how long a stream waits for room in the retry budget. Many streams break at once
// when their engine dies.
const budgetPatience = time.Minute

// awaitBudget charges a move to the retry budget of a pool, once that has room.
func awaitBudget(ctx context.Context, p *pool.Pool, patience time.Duration) bool {
	for begun := time.Now(); ; {
		b := p.Settings.Load().RetryBudget
		if !p.Budget.Spent(time.Now()) || *b == (pool.RetryBudget{}) || time.Since(begun) >= patience {
			return p.Budget.Charge(time.Now())
		}
		if !pool.Sleep(ctx, 100*time.Millisecond) {
			return false
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
// workers abort a request because somebody wants that. A worker that is slow to answer does not leave.
func (o *delivery) leaving(ctx context.Context) bool {
	d, w := o.d, o.attempt.Worker
	for end := time.Now().Add(leavingFor); ; {
		d.offers, _ = d.Renew()
		offered := slices.ContainsFunc(d.offers.Table.Rows, func(r pool.TableRow) bool { return r.Worker == w })
		h := w.Health.State(time.Now())
		if !offered || !d.Pool.IsUpstream(d.Pool.Settings.Load(), w) || w.Draining() || w.IsHung() || h.Away || !h.Until.IsZero() {
			return true
		}
		asked, cancel := context.WithTimeout(ctx, answerTime)
		status, _, err := d.Client.Fetch(asked, w.Dial, http.MethodGet, "/v1/models", nil, nil, 1<<20)
		late := asked.Err() != nil
		cancel()
		switch {
		case status >= http.StatusInternalServerError, status == 0 && err != nil && !late:
			return true
		case time.Now().After(end) || !pool.Sleep(ctx, leavingPause):
			return false
		}
	}
}

// mostAttempts is how many workers are asked for the rest of a stream.
const mostAttempts = 3

// seat finds a seat on none of the failed workers, if possible on another host than theirs.
func (r *remainder) seat(ctx context.Context) error {
	d, err := r.d, pool.ErrNoWorker
	if !r.well {
		d.tried = slices.Clone(r.failed)
		for _, row := range d.offers.Table.Rows {
			if row.Worker.Host() == r.attempt.Worker.Host() {
				d.tried = append(d.tried, row.Worker)
			}
		}
		want := d.Wants()
		if d.Pool.Some(&want, d.offers, func(_ *worker.Worker, v pool.Verdict) bool { return v == pool.Fits }) {
			err = d.seat(ctx)
		}
	}
	if errors.Is(err, pool.ErrNoWorker) {
		d.tried = slices.Clone(r.failed)
		err = d.seat(ctx)
	}
	if err != nil {
		return err
	}
	a := d.attempt
	r.failed = append(r.failed, a.Worker)
	d.tried = []*worker.Worker{a.Worker} // the stream may come back to the others later
	r.triesLeft--
	r.exact = r.rest.Way == api.WayExact
	resume.CountTokens(ctx, r.rest, attempt.ModelAt(d.plan, a.Worker), a.Worker, func(ctx context.Context, most int64) engine.Post {
		return d.AskTokenizer(ctx, d.plan, a.Worker, most)
	})
	return nil
}

// judge decides what follows from an attempt at the rest. Only a stream can go on. It records in r
// whether the worker is at fault, and whether it refuses to go on by ids.
func (r *remainder) judge(ctx context.Context, a *attempt.Attempt, resp *http.Response, err error) verdict {
	v := r.d.judge(ctx, resp, false, err)
	v.do, v.reason, v.misfit, v.free = fail, "", fits, false
	if err == nil && a.Streams(resp) && !body.Compressed(resp.Header) {
		v.do = deliver
		return v
	}
	refuses := err == nil && !attempt.Retryable(resp.StatusCode)
	if refuses { // it may be the rest's fault
		v.outcome = a.Shows(worker.OutcomeAnswered, "")
	}
	v.withheld = resp != nil
	r.blameless = v.outcome.Kind <= worker.OutcomeGood
	v.blameless = r.blameless
	r.refused = r.exact && (refuses || errors.Is(err, resume.ErrExact))
	last := r.refused || r.triesLeft == 0 || v.suspect && r.d.lastSuspect()
	if ctx.Err() == nil && !last {
		v.do = retry
	}
	return v
}
