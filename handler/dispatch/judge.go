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
	case status < 500 && attempt.TheirKey(d.Pool.Settings.Load().Worker(a.Worker.Dial).Headers): // another client may be welcome
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

// judgeFailure judges an attempt without an answer.
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
