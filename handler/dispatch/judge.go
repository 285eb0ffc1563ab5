package dispatch

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// action is what follows from an attempt.
type action uint8

const (
	deliver action = iota // the client gets the answer
	retry                 // the proxy makes another attempt
	fail                  // the client gets a held answer, or an error
	abandon               // the client has gone, or its body broke off
)

// effect is what an attempt shows of its worker's health.
type effect uint8

const (
	showsNothing effect = iota
	showsWell           // a good answer
	showsAbsent         // the worker refuses connections
	showsFailed         // the worker broke the connection, or sends requests away
	showsError          // an error that may be the worker's fault
)

// verdict is what is decided of an attempt that has come to an answer or an error.
type verdict struct {
	do     action
	reason string // of a retry, as metrics name it

	effect  effect
	why     string        // for the log
	wait    time.Duration // for which the worker asks to get no requests
	busy    bool          // the worker is not ill, but full
	own     bool          // the error is hardly the client's fault
	suspect bool          // the attempt may have reached the engine's computing
}

// judge decides what follows from an attempt, and changes nothing. err is why there
// is no answer. resent says that net/http sent the request twice, of which only the
// second one came to err.
func (rt *Dispatch) judge(ctx context.Context, resp *http.Response, resent bool, err error) verdict {
	if err != nil {
		return rt.judgeFailure(ctx, resent, err)
	}
	v, status := verdict{do: deliver}, resp.StatusCode
	switch {
	case retryable(status):
		v.effect, v.why, v.wait, v.busy = showsFailed, "status "+resp.Status, retryAfter(resp.Header, time.Now()), true
		if rt.repeatable(true) && rt.anotherTry(rt.suspects) {
			v.do, v.reason = retry, strconv.Itoa(status)
		}
	case rt.servedElsewhere(resp) && rt.anotherTry(rt.suspects):
		v.do, v.reason = retry, strconv.Itoa(status)
	case workersFault(status):
		v.effect, v.why, v.own = showsError, resp.Status, status >= 500
	case rt.plan.Request == nil || status >= 300 || body.Compressed(resp.Header):
		v.effect = showsWell // an answer that is read shows more
	}
	return v
}

// judgeFailure judges an attempt without an answer.
func (rt *Dispatch) judgeFailure(ctx context.Context, resent bool, err error) verdict {
	if ctx.Err() != nil || rt.plan.Stream != nil && rt.plan.Stream.Failed.Load() {
		return verdict{do: abandon}
	}
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	v := verdict{do: fail, effect: showsFailed, why: err.Error(), suspect: !unconnected || resent}
	if pool.Refused(err) {
		v.effect = showsAbsent
	}
	suspects := rt.suspects
	if v.suspect {
		suspects++
	}
	if rt.repeatable(!unconnected) && rt.anotherTry(suspects) {
		v.do, v.reason = retry, retryReason(err, !unconnected)
	}
	return v
}

// report tells the pool what an attempt has shown of its worker.
func (rt *Dispatch) reportOutcome(a *Attempt, v *verdict, err error) {
	if err == nil {
		rt.Pool.Answered(a.Worker)
	} else if v.do != abandon {
		a.Worker.Engine.AskAgain() // it may have restarted
	}
	switch v.effect {
	case showsNothing:
	case showsWell:
		rt.didWell(a)
	case showsAbsent:
		rt.Pool.Unreached(a.Worker, err)
	case showsFailed:
		rt.markDown(a, v.why, v.wait, v.busy)
	case showsError:
		rt.erred(a, v.why, v.own)
	}
}

// workersFault returns whether a status may say that the worker is ill or set up
// differently: clients' errors have other statuses, or come from all workers alike.
func workersFault(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed:
		return true
	}
	return status >= 500
}
