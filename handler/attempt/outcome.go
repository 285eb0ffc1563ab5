package attempt

import (
	"encoding/binary"
	"math/bits"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// Shows returns what an attempt has shown of its worker. docs/reliability.md shows when
// traffic moves away. Not all requests show whether it is well.
func (a *Attempt) Shows(kind worker.OutcomeKind, why string) worker.Outcome {
	good := kind == worker.OutcomeGood
	if (good || kind == worker.OutcomeErrored) && !a.Call.Plan.ShowsHealth || good && a.Answers != nil {
		kind, why = worker.OutcomeAnswered, ""
	}
	return worker.Outcome{Kind: kind, Begun: a.Begun, Why: why}
}

// Errored returns the outcome of an attempt whose answer is an error, which may be the
// worker's fault. own: the error is probably not the client's fault.
func (a *Attempt) Errored(why string, own bool) worker.Outcome {
	o := a.Shows(worker.OutcomeErrored, why)
	if o.Kind == worker.OutcomeErrored {
		o.Own, o.Blame, o.Peers = own, a.BlameKey(), a.Call.Owner.Offers().Table.Workers()
	}
	return o
}

// Unanswered returns what an attempt without an answer has shown of its worker.
func (a *Attempt) Unanswered(err error) worker.Outcome {
	o := worker.Unanswered(err)
	o.Begun = a.Begun
	return o
}

// Failed records that the answer is empty, or an error with a status; 0 is unknown. Not all requests
// show the worker's health.
func (a *Attempt) Failed(t time.Time, status int) {
	switch {
	case !a.Call.Plan.ShowsHealth:
		a.Prefilled(t)
	case status >= 400 && !WorkersFault(status):
		a.Seat.Mistaken(t)
	default:
		a.Seat.Failed(t)
	}
}

// BlameKey identifies the session or prompt of an error: one client alone must not mark a
// worker down. Requests without an API share one key. Each request without a known prompt has
// its own.
func (a *Attempt) BlameKey() uint64 {
	p := a.Call.Plan
	const blamedBlocks = 64 // of a long prompt, about
	switch {
	case p.API == nil:
		return 0
	case !p.Session.Key.IsZero():
		return binary.LittleEndian.Uint64(p.Session.Key[:]) // a hash already
	case len(p.Score.Blocks) == 0:
		return uint64(a.Call.Ready.UnixNano()) //nolint:gosec // after 1970
	}
	key, blocks := p.Score.Root, p.Score.Blocks
	for i := len(blocks) - 1; i >= 0; i -= 1 + len(blocks)/blamedBlocks { // from the last, where prompts differ
		key = (bits.RotateLeft64(key, 5) ^ blocks[i]) * 0x9e3779b97f4a7c15
	}
	return key
}

// Unsendable returns whether net/http refused the request before it dialed: its method or
// a header is invalid. That says nothing of the worker.
func Unsendable(err error) bool { return strings.HasPrefix(err.Error(), "net/http: invalid ") }

// WorkersFault returns whether a status may be the worker's fault: clients' errors have other
// statuses, or come from all workers alike.
func WorkersFault(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed:
		return true
	}
	return status >= 500
}

// Retryable returns whether a status means that the worker did not take the request.
func Retryable(status int) bool {
	return status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable ||
		status == 529 // Dynamo's and Anthropic's servers, when busy
}

// longestRetryAfter is the longest plausible Retry-After.
const longestRetryAfter = time.Hour

// RetryAfter returns the pause that a Retry-After header asks for; 0 if unknown.
func RetryAfter(h http.Header) time.Duration {
	text := h.Get("Retry-After")
	s, err := strconv.Atoi(text)
	if date, noDate := http.ParseTime(text); noDate == nil {
		s, err = int(time.Until(date)/time.Second)+1, nil
	}
	if err != nil || s < 0 || s > int(longestRetryAfter/time.Second) {
		return 0
	}
	return time.Duration(s) * time.Second
}
