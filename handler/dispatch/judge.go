package dispatch

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/split"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// judge decides what follows from an attempt. It changes nothing, but misfit may read the
// beginning of resp.Body and put it back. resent: net/http sent the request twice, and err is
// the error of the second time. docs/reliability.md shows the result for each fault.
func (d *Dispatch) judge(ctx context.Context, resp *http.Response, resent bool, err error) verdict {
	if v, failed := d.judgePhases(ctx, resp, err); failed {
		return v
	}
	if err != nil {
		return d.judgeFailure(ctx, resent, err)
	}
	if v, refuses := d.judgeBackup(resp); refuses {
		return v
	}
	if why := d.misfit(resp); why != fits {
		return d.judgeMisfit(resp, why)
	}
	a, status := d.attempt, resp.StatusCode
	v := verdict{do: deliver, outcome: a.Shows(pool.OutcomeAnswered, "")}
	switch {
	case attempt.Retryable(status):
		if d.plan.ShowsHealth {
			v.outcome = a.Shows(pool.OutcomeBusy, "status "+resp.Status)
			v.outcome.Wait = attempt.RetryAfter(resp.Header)
		}
		if d.repeatable(true) && d.anotherTry(d.suspects) {
			v.do, v.reason = retry, strconv.Itoa(status)
		}
	case attempt.WorkersFault(status):
		v.outcome = a.Errored(resp.Status, status >= 500)
	case status < 300 && (d.plan.Request == nil || body.Compressed(resp.Header)):
		v.outcome = a.Good() // an answer that is read shows more
	}
	return v
}

// disownedFor is how long a backup is not asked that refuses the router's key.
const disownedFor = time.Minute

// judgeBackup judges an answer by which a backup refuses the router and not the client. ok is false for
// other answers.
func (d *Dispatch) judgeBackup(resp *http.Response) (v verdict, ok bool) {
	a, status := d.attempt, resp.StatusCode
	if !a.Worker.IsBackup() || !attempt.Disowns(status) {
		return v, false
	}
	v = verdict{do: fail, outcome: a.Shows(pool.OutcomeBusy, "status "+resp.Status), withheld: true, reason: strconv.Itoa(status)}
	switch v.outcome.Wait = attempt.RetryAfter(resp.Header); {
	case status < 500 && attempt.TheirKey(a.Worker.Settings().Headers): // another client may be welcome
		v.do, v.outcome, v.withheld, v.blameless = deliver, a.Shows(pool.OutcomeAnswered, ""), false, true
	case !attempt.Retryable(status):
		v.outcome.Wait = max(v.outcome.Wait, disownedFor)
	}
	if d.repeatable(true) && d.anotherTry(d.suspects) {
		v.do = retry
	}
	return v, true
}

// judgePhases decides what follows from an attempt whose pair of workers failed. ok is false if it
// did not: then the attempt is judged as any other.
func (d *Dispatch) judgePhases(ctx context.Context, resp *http.Response, err error) (v verdict, ok bool) {
	if d.phases == nil || ctx.Err() != nil {
		return v, false
	}
	failed := d.phases.Failure(resp, err)
	if failed == nil {
		return v, false
	}
	v = verdict{do: retry, reason: failed.Reason, phases: failed, suspect: d.phases.Broke(failed)}
	if !d.mayGoOnTrying() || v.suspect && d.lastSuspect() {
		v.do = fail
		if resp != nil {
			v.do = deliver
		}
	}
	return v, true
}

func (d *Dispatch) judgeFailure(ctx context.Context, resent bool, err error) verdict {
	a := d.attempt
	if ctx.Err() != nil || d.plan.Once != nil && d.plan.Once.Failed.Load() {
		return verdict{do: abandon}
	}
	if _, own := errors.AsType[*api.Refusal](err); own || attempt.Unsendable(err) {
		return verdict{do: fail}
	}
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	v := verdict{do: fail, outcome: a.Unanswered(err), suspect: !unconnected || resent}
	if errors.Is(err, attempt.ErrDrained) {
		v.outcome, v.suspect = pool.Outcome{}, false
	}
	suspects := d.suspects
	if v.suspect {
		suspects++
	}
	if d.repeatable(!unconnected) && d.anotherTry(suspects) {
		v.do, v.reason = retry, "broken"
		if ended, ok := errors.AsType[*attempt.EndedError](err); ok {
			v.reason = ended.Reason
		} else if unconnected {
			v.reason = "refused"
		}
	}
	return v
}

// action is what follows from an attempt.
type action uint8

const (
	deliver action = iota // the client gets the answer
	retry                 // another attempt follows
	fail                  // the client gets the held answer, or an error
	abandon               // the client has gone, or its body broke
	putOff                // the client must try again later: see putsOff
)

// verdict is what follows from an attempt.
type verdict struct {
	do        action
	reason    string       // of a retry, as metrics name it
	outcome   pool.Outcome // what the pool records of the worker
	phases    *split.Error // the pair of workers failed, and not the attempt's worker; nil otherwise
	suspect   bool         // the engine may have begun to compute: the request may have crashed it
	misfit    misfit       // the worker cannot serve the request, and another one may
	blameless bool         // a retry is not the worker's fault
	withheld  bool         // the client must not see the answer
}

// These functions decide whether another attempt may follow. "Limits" are lb_try_duration and
// lb_retries. A pinned request has neither another round nor another try.
//
//	                                       with limits         without limits
//	repeatable    may it be sent again?    depends on the request only
//	anotherRound  may a tried worker       while the limits    never
//	              get it again?            allow it
//	anotherTry    may any attempt follow?  as anotherRound     while an untried worker is left, and
//	                                                           suspects are fewer than maxSuspects
//	lastSuspect   is the present attempt   never               if one suspect more makes
//	              the last if it breaks?                       maxSuspects
//
// Suspects do not count with limits, because the operator has chosen them.

// repeatable returns whether the request can be sent again. reached: it may have reached a
// worker.
func (d *Dispatch) repeatable(reached bool) bool {
	if d.plan.Once != nil && d.plan.Once.Touched.Load() {
		return false
	}
	return !reached || d.plan.Repeatable
}

// anotherRound returns whether the operator's limits allow another try of the tried workers.
func (d *Dispatch) anotherRound() bool {
	return !d.pinned() && d.Limits.Set() && d.Limits.allow(d.start, d.attempts)
}

// anotherTry returns whether a further attempt may find a worker within the operator's limits.
func (d *Dispatch) anotherTry(suspects int) bool {
	return d.anotherRound() || !d.Limits.Set() && suspects < maxSuspects && d.otherLeft()
}

// lastSuspect returns whether no attempt may follow if the present one breaks.
func (d *Dispatch) lastSuspect() bool {
	return !d.Limits.Set() && d.suspects+1 >= maxSuspects
}

// IsFinal returns whether no attempt on another worker can follow. Either no untried
// worker is left, or lastSuspect holds, or the retry budget is spent.
func (d *Dispatch) IsFinal() bool {
	return !d.otherLeft() || d.lastSuspect() || d.Pool.Budget.Spent(time.Now())
}

// mayGoOnTrying returns whether the operator's limits allow another attempt.
func (d *Dispatch) mayGoOnTrying() bool {
	return !d.Limits.Set() || d.Limits.allow(d.start, d.attempts)
}

// maxSuspects bounds the failed attempts that may have reached an engine: the request itself
// may crash engines.
const maxSuspects = 2

// affordable returns whether the retry budget allows another attempt after err. A failed
// connection is free, because it costs no worker anything. The pool has already charged a move
// from a hung worker, and check one from a silent prefill worker.
func (d *Dispatch) affordable(err error) bool {
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	return unconnected || d.attempt.Moved() || errors.Is(err, split.ErrPrefillGone) || d.Pool.Budget.MayRetry(time.Now())
}
