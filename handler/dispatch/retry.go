package dispatch

import (
	"errors"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/split"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

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
	return !d.otherLeft() || d.lastSuspect() || d.Pool.Spending.Spent(time.Now(), d.Pool.Settings.Load().RetryBudget)
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
	return unconnected || d.attempt.Moved() || errors.Is(err, split.ErrPrefillGone) || d.Pool.MayRetry(time.Now())
}
