// Package attempt is one try on one worker: the request in its engine's words, the deadlines, and what
// the try shows of its worker. It knows no retry: its caller decides what follows.
package attempt

import (
	"cmp"
	"encoding/binary"
	"errors"
	"math/bits"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"go.uber.org/zap"
)

// Runner sends the attempts of one configuration.
type Runner struct {
	Pool      *pool.Pool
	Transport Transport
	Logger    *zap.Logger
	Labels    string // prefix of the response headers that say how a request was routed
	// ServerTiming and CacheStatus are whether answers have these headers.
	ServerTiming, CacheStatus bool
}

// Transport makes round trips to workers.
type Transport interface {
	// Send makes one round trip.
	Send(*http.Request) (*http.Response, error)
	// SendFresh makes one on a new connection.
	SendFresh(*http.Request) (*http.Response, error)
}

// Owner is the request that makes attempts.
type Owner interface {
	// Wants returns the requirements on another worker, and Offers the present workers.
	Wants() pool.Wants
	Offers() pool.Offers
	// IsFinal returns whether no other attempt can follow.
	IsFinal() bool
}

// Call is what the attempts of one request have in common: what workers are sent. Only the goroutine
// that serves the request touches it.
type Call struct {
	*Runner
	Owner   Owner
	Plan    *plan.Plan
	Ready   time.Time    // when the body was read
	Body    *body.Replay // nil if it is not in memory, or is not sent again
	Trace   *Trace
	Session string    // the engine's id of the session; empty if none holds it
	Rest    *api.Rest // that is asked for; nil for the whole answer
	AskIDs  bool      // the engine is to return the ids of the answer's tokens
	// Exactly is how a rest is asked for by the ids of tokens.
	Exactly func(*Attempt, Sender) Sender

	Sent *http.Request // of the last attempt
	Did                // to that
}

// Sender makes one round trip.
type Sender func(*http.Request) (*http.Response, error)

// Attempt is one try on one worker. Its seat is taken with [pool.Pool.Seat].
type Attempt struct {
	pool.Seat
	*watch    // may end it early; nil if nothing may
	Call      *Call
	Phase     *engine.Phase // the part of the request that the worker serves; nil: the whole request
	Prefill   *Attempt      // that computes the prompt; nil if this one does
	Answers   *Attempt      // whose worker has answered in place of this one's; nil if none has
	Reason    string        // of the choice
	Number    int           // among the attempts of the request, from 1
	CostsTime bool          // its cost is in milliseconds, and has terms
	resends   atomic.Int32  // how often net/http has sent the request again
	counted   atomic.Bool   // it has been counted, or is not to be
}

// Counts are the figures of the worker that answers, for the request's model.
func (a *Attempt) Counts() *observe.ModelMetrics {
	if a.Answers != nil {
		a = a.Answers
	}
	return a.Worker.ModelMetrics(a.Call.Plan.Model)
}

// Computes returns the attempt whose worker computes the prompt.
func (a *Attempt) Computes() *Attempt {
	if a.Prefill != nil {
		return a.Prefill
	}
	return a
}

// Header sends the request and returns the answer with its header. resent: net/http sent the request
// twice, and err is the error of the second time.
func (a *Attempt) Header(req *http.Request, b *Bounds) (resp *http.Response, resent bool, err error) {
	c := a.Call
	sent := a.watched(req, b)
	resp, resent, err = a.send(c.Transport.Send, sent)
	if err != nil && resent && c.Plan.API != nil && sent.Context().Err() == nil && c.Owner.IsFinal() {
		// The only worker closed idle connections, and net/http's second try met
		// another one of these.
		a.CountRetry("reconnect")
		resp, _, err = a.send(c.Transport.SendFresh, sent)
	}
	if err = a.arrived(resp, err, b); err != nil {
		return nil, resent, err
	}
	return resp, resent, nil
}

// send makes one round trip. It returns whether net/http sent the request again after a kept
// connection turned out closed.
func (a *Attempt) send(roundTrip Sender, req *http.Request) (*http.Response, bool, error) {
	c := a.Call
	name := a.name(req)
	fit := a.build(req, c.Sent != nil || a.Phase != nil || name != "")
	if name != "" {
		fit.Header[engine.HeaderSession] = []string{name}
	}
	c.Sent = c.Trace.Carry(fit)
	backup := a.Worker.IsBackup()
	if backup {
		c.Sent = toBackup(c.Sent, a.Worker.Settings().Headers)
	}
	if c.Rest != nil && c.Rest.Way == api.WayExact {
		roundTrip = c.Exactly(a, roundTrip)
	}
	resp, err := roundTrip(c.Sent)
	if err == nil && backup {
		fromBackup(resp)
	}
	if err == nil && readsAnswer(c.Plan, a.Worker) {
		response.Unpack(resp)
	}
	resent := a.resends.Load() > 0
	if resent {
		a.Worker.Past.Retried("resend", 1)
	}
	return resp, resent, err
}

// name has the engine's KV events name the request, if the cache models can learn of that. It returns
// the name that this attempt sends; empty if the client's stays.
func (a *Attempt) name(req *http.Request) string {
	if a.Lease == nil || a.Call.Body == nil || a.Call.Plan.Request == nil || !a.Worker.Engine().NamesSessions() {
		return ""
	}
	session := cmp.Or(a.Call.Plan.Request.SessionID, req.Header.Get(engine.HeaderSession)) // in the engine's order
	if session != "" && !strings.HasPrefix(session, cache.OwnSession) {
		a.Named(session)
		return ""
	}
	if session = cache.NewSession(a.Call.Plan.Score.Prefixes); a.Named(session) {
		return session
	}
	return ""
}

// CountRetry counts a retry after an attempt.
func (a *Attempt) CountRetry(reason string) {
	a.Worker.Past.Retried(reason, 1)
	a.Call.Trace.Event("retry", a, [2]string{"reason", reason})
}

// CountOutcome counts the attempt by its outcome, once. failed: by its worker's fault, as far as the router
// knows. An empty outcome leaves the attempt out of its worker's figures.
func (a *Attempt) CountOutcome(outcome string, failed bool) {
	if !a.counted.Swap(true) && outcome != "" {
		a.Counts().Ended(outcome, failed)
	}
}

// Own are requests of the router's own, which make engines compute a prompt. Their answers are read whole.

// Build returns the request of an attempt of the router's own. like is the client's, to any worker.
func (a *Attempt) Build(like *http.Request) *http.Request {
	out := *a.Call.Trace.Carry(a.build(like, true))
	u := *out.URL // the transport changes it
	out.URL = &u
	return &out
}

// ErrUnread means that the answer to a request of the router's own is no answer, or too long.
var ErrUnread = errors.New("the answer is an error, or cannot be read")

// Read sends the request and reads the answer, which has at most so many bytes. The status is 0 without an
// answer.
func (a *Attempt) Read(req *http.Request, send Sender, most int64) (status int, data []byte, answer *api.Answer, err error) {
	resp, err := send(req)
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	response.Unpack(resp)
	data, err = upstream.ReadAll(resp.Body, most)
	tooLong := errors.Is(err, upstream.ErrTooLong)
	switch {
	case err != nil && !tooLong:
		return 0, nil, nil, err
	case resp.StatusCode >= http.StatusMultipleChoices:
		return resp.StatusCode, nil, nil, errors.New("status " + resp.Status)
	case tooLong:
		return resp.StatusCode, nil, nil, ErrUnread
	}
	answer = a.Call.Plan.Request.NewAnswer(false)
	answer.Write(data)
	if answer.Finish(); answer.Failed() {
		err = ErrUnread
	}
	return resp.StatusCode, data, answer, err
}

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
// worker's fault. serverSide: the error is probably not the client's fault.
func (a *Attempt) Errored(why string, serverSide bool) worker.Outcome {
	o := a.Shows(worker.OutcomeErrored, why)
	if o.Kind == worker.OutcomeErrored {
		o.ServerSide, o.CulpritKey, o.Peers = serverSide, a.CulpritKey(), a.Call.Owner.Offers().Table.Workers()
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

// CulpritKey identifies the session or prompt of an error: one client alone must not mark a
// worker down. Requests without an API share one key. Each request without a known prompt has
// its own.
func (a *Attempt) CulpritKey() uint64 {
	p := a.Call.Plan
	const keyedBlocks = 64 // of a long prompt, about
	switch {
	case p.API == nil:
		return 0
	case !p.Session.Key.IsZero():
		return binary.LittleEndian.Uint64(p.Session.Key[:]) // a hash already
	case len(p.Score.Blocks) == 0:
		return uint64(a.Call.Ready.UnixNano()) //nolint:gosec // after 1970
	}
	key, blocks := p.Score.Root, p.Score.Blocks
	for i := len(blocks) - 1; i >= 0; i -= 1 + len(blocks)/keyedBlocks { // from the last, where prompts differ
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
