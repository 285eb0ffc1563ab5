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
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"
)

// breakage is how a stream broke off.
type breakage struct {
	why     error
	failed  *split.Error // the pair of workers failed; nil if it did not
	misfit  bool         // the engine refuses the prompt as too long
	refused bool         // an endpoint of the engine's refuses to go on by ids
	drained bool         // the worker is well, and so is its host
}

// Move implements response.Mover. The rest is asked for as an ordinary attempt: with a lease, in
// the queue, within the retry budget.
func (o *delivery) Move(why error, a *api.Answer) *response.Rest {
	d := o.d
	ctx := d.proxied.Context()
	if ctx.Err() != nil {
		return nil
	}
	b := breakage{
		why: why, failed: o.phases.BrokeBefore(why), misfit: errors.Is(why, response.ErrMisfit), refused: errors.Is(why, resume.ErrExact),
	}
	b.drained = b.misfit || errors.Is(why, attempt.ErrDrained)
	if b.refused {
		a.LoseIDs()
	}
	if o.ends(ctx, &b, a) {
		return nil
	}
	rest, reason := o.rest(a)
	if b.misfit {
		d.refused(tooLong)
	}
	if reason == "" && !a.FirstToken() && !b.drained && b.failed == nil {
		if d.lastSuspect() {
			reason = resume.StaysTries
		}
		d.suspects++
	}
	charged := o.attempt.Stay() || b.misfit // by the pool, to the budget; or free
	if reason != "" {
		if !b.misfit {
			o.refuseMove(reason)
		}
		o.told = o.told || b.refused // it is not the worker's fault
		return nil
	}
	left := o.attempt
	o.leave(&b, a, rest)
	way := rest.Way
	part, rest, reason := o.ask(ctx, &b, a, rest, charged)
	if part == nil && ctx.Err() != nil {
		return nil // the client has left
	}
	if rest != nil {
		way = rest.Way // ask may have changed it
	}
	outcome := "ok"
	switch {
	case part == nil:
		outcome = "failed"
		o.refuseMove(reason)
	case errors.Is(why, attempt.ErrDrained):
		left.End(observe.AttemptDrained, false)
	default:
		left.End(observe.AttemptResumed, !b.drained)
	}
	cause := resume.Cause(why)
	d.Metrics.resumed.WithLabelValues(d.Pool.Name, cause, way, outcome).Inc()
	d.Trace.Resumed(d.attempt, cause, way, outcome)
	return part
}

// ends returns whether a stream ends here, as somebody wants it or as its engine means it.
func (o *delivery) ends(ctx context.Context, b *breakage, a *api.Answer) bool {
	switch {
	case errors.Is(b.why, io.EOF) && a.Done() && !o.attempt.Worker.Engine().Closes(): // it is an end
	case o.d.aborted():
		o.told = true // it is not the worker's fault
		o.Stays()
	case errors.Is(b.why, response.ErrAborted) && b.failed == nil && !o.leaving(ctx):
		o.Stays()
	default:
		return false
	}
	return true
}

// leave ends the attempt of a stream that moves, and reports what it has shown of its worker.
func (o *delivery) leave(b *breakage, a *api.Answer, rest *api.Rest) {
	d := o.d
	if b.failed != nil {
		o.attempt.Uncounted() // its worker is well
		d.retryPhases(b.failed)
	}
	if rest.Way != api.WayWhole {
		d.split.KeepWhole("its stream goes on elsewhere") // no prefill phase has the text so far
	}
	b.drained = b.drained || b.failed != nil || b.refused
	if o.told = true; !b.drained {
		shown := o.attempt.Shows(pool.OutcomeBroken, "stream broke: "+b.why.Error())
		if errors.Is(b.why, response.ErrEvent) {
			shown = o.attempt.Errored(errorWithin, false)
			if !a.FirstToken() {
				o.attempt.Failed(time.Now(), a.ErrorStatus())
			}
		}
		d.Pool.Report(o.attempt.Worker, shown)
	}
	d.leave(a.FirstToken(), nil)
}

// ask asks for the rest once the retry budget allows it. If no engine goes on by ids, it asks for it
// otherwise. It returns what it has asked for last.
func (o *delivery) ask(
	ctx context.Context, b *breakage, a *api.Answer, rest *api.Rest, charged bool,
) (part *response.Rest, asked *api.Rest, reason string) {
	old, patience := o.attempt.Worker, budgetPatience
	if b.failed != nil || b.refused {
		old = nil // the decode worker is well, or may go on otherwise
	}
	if errors.Is(b.why, response.ErrEvent) {
		patience = 0 // the client can have the event at once
	}
	if !charged && !o.awaitBudget(ctx, patience) {
		return nil, rest, resume.StaysBudget
	}
	part, reason = o.goOn(ctx, rest, old, b.drained)
	if reason != resume.NotExact {
		return part, rest, reason
	}
	a.LoseIDs()
	if rest, reason = o.rest(a); reason == "" {
		part, reason = o.goOn(ctx, rest, old, b.drained)
	}
	return part, rest, reason
}

func (o *delivery) refuseMove(reason string) {
	d := o.d
	d.Metrics.stayed.WithLabelValues(d.Pool.Name, reason).Inc()
	d.Pool.Raise(time.Now(), "streams break that cannot go on at other workers", o.attempt.Worker.Past.LastFailure())
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

// goOn asks other workers for the rest until one gives it, or returns the reason why none does. The
// worker so far is old, or may serve the rest if old is nil. If drained, it is well, and so is its host.
func (o *delivery) goOn(ctx context.Context, rest *api.Rest, old *worker.Worker, drained bool) (*response.Rest, string) {
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
	resp, err := d.run(ctx, r) //nolint:bodyclose // the stream's reader closes it
	switch {
	case err == nil:
		o.arrive(ctx, d.attempt, drained)
		return &response.Rest{From: resp.Body, Ctx: d.attempt.Context(), Splicer: rest.Splicer, Name: d.attempt.PublicName()}, ""
	case r.refused:
		reason = resume.NotExact
	default:
		reason = resume.StaysNoWorker
	}
	if a := d.attempt; a != o.attempt {
		outcome := observe.AttemptRetried
		if ctx.Err() != nil {
			outcome = outcomeClientGone
		}
		a.End(outcome, !r.blameless)
	}
	return nil, reason
}

func (o *delivery) arrive(ctx context.Context, a *attempt.Attempt, drained bool) {
	d, left := o.d, o.attempt.Worker
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
		d.Pool.Raise(time.Now(), "streams break off, and go on at other workers", left.Past.LastFailure())
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
		if !d.Pool.Budget.Spent(time.Now()) || *b == (pool.RetryBudget{}) || time.Since(begun) >= patience {
			return d.Pool.Budget.MayRetry(time.Now())
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
// workers abort a request because somebody wants that.
func (o *delivery) leaving(ctx context.Context) bool {
	for end := time.Now().Add(leavingFor); ; {
		if o.left(ctx) {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		if !pool.Sleep(ctx, leavingPause) {
			return false
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

// mostAttempts is how many workers are asked for the rest of a stream.
const mostAttempts = 3

// remainder is the rest of a stream, which other workers are asked for.
type remainder struct {
	*delivery
	rest    *api.Rest
	failed  []*worker.Worker // that cannot give it, or have not
	apart   *worker.Worker   // other hosts than that of this worker are better; nil if any host is as good
	left    int              // attempts that may follow
	exact   bool             // the latest one asks for it by the ids of tokens
	refused bool             // an engine cannot go on with the ids of the answer's tokens

	blameless bool // the latest attempt failed by no fault of its worker
}

func (r *remainder) seat(ctx context.Context, d *Dispatch) error {
	if err := d.seatApart(ctx, r.apart, r.failed); err != nil {
		return err
	}
	a := d.attempt
	r.failed = append(r.failed, a.Worker)
	d.tried = []*worker.Worker{a.Worker} // the stream may come back to the others later
	r.left--
	r.exact = r.rest.Way == api.WayExact
	resume.CountTokens(ctx, r.rest, attempt.ModelAt(d.plan, a.Worker), a.Worker, func(ctx context.Context, most int64) engine.Post {
		return d.AskTokenizer(ctx, d.plan, a.Worker, most)
	})
	return nil
}

// judge decides what follows from an attempt at the rest. Only a stream can go on.
func (r *remainder) judge(ctx context.Context, a *attempt.Attempt, resp *http.Response, err error) verdict {
	v := r.d.judge(ctx, resp, false, err)
	v.do, v.reason, v.misfit = fail, "", fits
	if err == nil && a.Streams(resp) && !body.Compressed(resp.Header) {
		v.do = deliver
		return v
	}
	refuses := err == nil && !attempt.Retryable(resp.StatusCode)
	if refuses { // it may be the rest's fault
		v.outcome = a.Shows(pool.OutcomeAnswered, "")
	}
	if resp != nil {
		_ = resp.Body.Close()
	}
	r.blameless = v.outcome.Kind <= pool.OutcomeGood
	v.blameless = r.blameless
	r.refused = r.exact && (refuses || errors.Is(err, resume.ErrExact))
	last := r.refused || r.left == 0 || v.suspect && r.d.lastSuspect()
	if ctx.Err() == nil && !last && r.d.affordable(err) {
		v.do = retry
	}
	return v
}
