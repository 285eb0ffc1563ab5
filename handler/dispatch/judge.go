package dispatch

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/bits"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/zeebo/xxh3"

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

// verdict is what follows from an attempt.
type verdict struct {
	do      action
	reason  string       // of a retry, as metrics name it
	outcome pool.Outcome // what the pool is told
	suspect bool         // the attempt may have reached the engine's computing
}

// judge decides what follows from an attempt, and changes nothing. resent says that net/http
// sent the request twice, and err came of the second.
func (d *Dispatch) judge(ctx context.Context, resp *http.Response, resent bool, err error) verdict {
	if err != nil {
		return d.judgeFailure(ctx, resent, err)
	}
	a, status := d.attempt, resp.StatusCode
	v := verdict{do: deliver, outcome: a.shows(pool.OutcomeAnswered, "")}
	switch {
	case retryable(status):
		v.outcome = a.shows(pool.OutcomeBusy, "status "+resp.Status)
		v.outcome.Wait = retryAfter(resp.Header, time.Now())
		if d.repeatable(true) && d.anotherTry(d.suspects) {
			v.do, v.reason = retry, strconv.Itoa(status)
		}
	case d.servedElsewhere(resp) && d.anotherTry(d.suspects):
		v.do, v.reason = retry, strconv.Itoa(status)
	case workersFault(status):
		v.outcome = d.errored(a, resp.Status, status >= 500)
	case d.plan.Request == nil || status >= 300 || body.Compressed(resp.Header):
		v.outcome.Kind = pool.OutcomeGood // an answer that is read shows more
	}
	return v
}

// judgeFailure judges an attempt without an answer.
func (d *Dispatch) judgeFailure(ctx context.Context, resent bool, err error) verdict {
	if ctx.Err() != nil || d.plan.Stream != nil && d.plan.Stream.Failed.Load() {
		return verdict{do: abandon}
	}
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	v := verdict{do: fail, outcome: d.attempt.shows(pool.OutcomeBroken, err.Error()), suspect: !unconnected || resent}
	if pool.Refused(err) {
		v.outcome.Kind = pool.OutcomeRefused
	}
	suspects := d.suspects
	if v.suspect {
		suspects++
	}
	if d.repeatable(!unconnected) && d.anotherTry(suspects) {
		v.do, v.reason = retry, "broken"
		if ended, ok := errors.AsType[*endedError](err); ok {
			v.reason = ended.reason
		} else if unconnected {
			v.reason = "refused"
		}
	}
	return v
}

// workersFault returns whether a status may be the worker's fault: clients' errors have other
// statuses, or come from all workers alike.
func workersFault(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed:
		return true
	}
	return status >= 500
}

// shows returns what an attempt has shown of its worker.
func (a *attempt) shows(kind pool.OutcomeKind, why string) pool.Outcome {
	return pool.Outcome{Kind: kind, Begun: a.Begun, Why: why}
}

// errored returns the outcome of an attempt whose answer is an error. The worker may be at
// fault; own: the client hardly is.
func (d *Dispatch) errored(a *attempt, why string, own bool) pool.Outcome {
	o := a.shows(pool.OutcomeErrored, why)
	o.Own, o.Blame, o.Peers = own, d.blameKey(), d.table(d.offered).Rows
	return o
}

// garbled records an answer that is not what its content type says. The session leaves the
// worker. One such answer may be anybody's fault; a worker that gives no others is ill.
func (d *Dispatch) garbled(a *attempt) {
	d.FallBack(fallbackUnreadable)
	d.Pool.Report(a.Worker, d.errored(a, "not what their content type says", true))
	if d.seenAt == a.lease.Target() {
		d.Pool.Sessions.Remove(d.session, d.bound)
	}
}

// blameKey identifies the session or prompt that an error is held against: one client alone
// must not mark a worker down. Requests without an API share one key; those without a known
// prompt have one each.
func (d *Dispatch) blameKey() uint64 {
	switch {
	case d.plan.API == nil:
		return 0
	case d.plan.Session.Key != "":
		return xxh3.HashString(d.plan.Session.Key)
	case len(d.plan.Score.Blocks) == 0:
		return uint64(d.ready.UnixNano()) //nolint:gosec // after 1970
	}
	key := d.plan.Score.Root
	for _, b := range d.plan.Score.Blocks {
		key = (bits.RotateLeft64(key, 5) ^ b) * 0x9e3779b97f4a7c15
	}
	return key
}

// retryable returns whether a status says that the worker did not take the request.
func retryable(status int) bool {
	return status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable ||
		status == 529 // Dynamo's and Anthropic's servers, when busy
}

// longestRetryAfter is the longest pause of a worker that is believed.
const longestRetryAfter = time.Hour

// retryAfter returns how long a Retry-After header says to wait (RFC 9110, 10.2.3); 0 if
// unknown. A date is compared with the answer's own Date.
func retryAfter(h http.Header, now time.Time) time.Duration {
	value := h.Get("Retry-After")
	if value == "" {
		return 0
	}
	var wait time.Duration
	if s, err := strconv.Atoi(value); err == nil {
		wait = time.Duration(min(max(s, -1), 2*int(longestRetryAfter/time.Second))) * time.Second
	} else if until, err := http.ParseTime(value); err == nil {
		if theirs, err := http.ParseTime(h.Get("Date")); err == nil {
			now = theirs
		}
		wait = until.Sub(now)
	}
	if wait < 0 || wait > longestRetryAfter {
		return 0
	}
	return wait
}

// servedElsewhere returns whether an answer says that the worker lacks the request's model
// while an untried worker may have it. Nothing was computed, so any request may be made again.
func (d *Dispatch) servedElsewhere(resp *http.Response) bool {
	a := d.attempt
	if resp.StatusCode != http.StatusNotFound || d.plan.Model == "" || d.plan.Stream != nil || d.pinned() || body.Compressed(resp.Header) {
		return false
	}
	_, told := a.Worker.Serves(d.plan.Model)
	found := false
	for i, row := range d.table(d.offered).Rows {
		w := row.Worker
		if w == a.Worker || !pool.Available(d.offered[i]) || slices.Contains(d.tried, w) || !d.permits(w) {
			continue
		}
		yes, known := w.Serves(d.plan.Model)
		found = found || yes || !known && (told || !w.WasProbed())
	}
	if !found {
		return false
	}
	head, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	resp.Body = &response.Replayed{ReadCloser: resp.Body, Held: head, Err: err}
	return bytes.Contains(bytes.ToLower(head), []byte("model")) // else the path is unknown
}
