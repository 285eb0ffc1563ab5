// Package dispatch takes one request over all its attempts. It selects a worker, sends the
// request, judges the result, retries, and reports the end. Caddy's reverse proxy enters by two
// doors: Select takes the seat of the first attempt, and RoundTrip makes all attempts.
package dispatch

import (
	"context"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

type dispatchKey struct{}

// dispatchOf returns the dispatch of a request by its context; nil if there is none.
func dispatchOf(ctx context.Context) *Dispatch {
	d, _ := ctx.Value(dispatchKey{}).(*Dispatch)
	return d
}

// AttemptOf returns the round tripper of a request that a dispatcher has begun; nil for other
// requests, such as health checks.
func AttemptOf(ctx context.Context) http.RoundTripper {
	if d := dispatchOf(ctx); d != nil {
		return d
	}
	return nil // and not a nil *Dispatch
}

// Dispatch is one request over all its attempts. Only the goroutine that serves the
// request touches it.
type Dispatch struct {
	route
	attempt.Call
	start   time.Time
	wait    waiting // in the queue
	version uint64  // of the offers, see follower

	// the choice of workers so far
	attempt  *attempt.Attempt
	phases   *split.Phases // of the attempt; nil if the request is not split
	attempts int
	seated   atomic.Bool       // a worker was found
	suspects int               // failed attempts that may have reached an engine
	unfit    []*worker.Worker  // that have refused for a misfit
	lacks    bool              // one of them lacks the model
	triedBuf [4]*worker.Worker // backs tried for the first four workers
	failure  error             // of the last attempt
	held     heldAnswer
	later    bool // the client must try again later: see putsOff

	// the request's body and header on the way to workers
	followUp FollowUp          // needs the body after the answer; nil if nothing follows
	lazy     *body.Lazy        // the body as the proxy sees it
	proxied  *http.Request     // the proxy's request for the first worker
	original upstream.Original // its header before that
	exact    bool              // the stream may go on elsewhere by the ids of its tokens
	cutIDs   bool              // the router has asked for these, and the client does not get them
	cut      nvext.Grants      // the grants that were missing for members cut out of the body

	// what the client gets

	// OwnLimits says that the client has headers of its tenant's limits, in place of the engine's.
	OwnLimits bool

	answer   *delivery // nil while there is none
	cached   int64     // the engine's count of cached tokens; -1 is unknown
	err      error
	returned bool // false in End if the proxy panicked, as it does to abort
}

// delivery is the answer of an attempt. It listens to the answer's body and records what that
// shows of the worker.
type delivery struct {
	response.Summary // complete once the answer has ended
	d                *Dispatch
	attempt          *attempt.Attempt
	phases           *split.Phases // of the attempt; nil if the request is not split
	body             *response.Body

	// of a stream that moves from worker to worker
	moved    int   // how often it has moved
	before   int   // events with tokens before the last move
	reported bool  // the pool knows that its attempt has ended
	noRoom   bool  // its body was not kept
	room     int64 // bytes that are reserved for its text

	header time.Time // when the header of an answer that is no stream came
	alive  time.Time // the lease's latest sign of life
	tokens int       // events with tokens so far
	waits  bool      // a read of the worker's next bytes is under way

	trailer http.Header // of a stream, for its time to the first token; nil if the client gets none
}

// heldAnswer is a worker's answer that calls for a retry. The client gets it if no later attempt
// delivers an answer.
type heldAnswer struct {
	resp    *http.Response
	attempt *attempt.Attempt
}

func (h *heldAnswer) drop() {
	if h.resp != nil {
		_ = h.resp.Body.Close()
		*h = heldAnswer{}
	}
}

// waiting is what the request's waits came to, over all attempts.
type waiting struct {
	waited     time.Duration // in the queue
	most       time.Duration // that it may wait, as the last wait began
	since      time.Time     // when it began to wait for the seat that it has no time of in waited; zero if it did not
	why        string        // the request waited last
	turnedAway *api.Refusal  // why the request is not served
	left       error         // the client's context ended meanwhile
}

// route is where a request may go, and how it chooses. To explain a choice needs no more.
type route struct {
	*Dispatcher
	plan   *plan.Plan
	ready  time.Time // when its body was read
	repl   *caddy.Replacer
	turn   turn.Turn   // its part in its session
	offers pool.Offers // the proxy's latest
	policy kvscore.Policy
	fixed  *fixed           // the one worker that may serve it; nil if others may, too
	tried  []*worker.Worker // in this round over the workers
	beyond int64            // tokens: a worker with room for so many has refused the prompt as too long
	split  split.Request
}

// fixed is the one worker that may serve a request.
type fixed struct {
	worker *worker.Worker
	rank   nvext.Opt[uint32]
	reason string
}

// misfit is why a worker cannot serve a request that another one may serve.
type misfit uint8

const (
	fits misfit = iota
	lacksModel
	lacksPath // or what the path names
	tooLong
)

// Limits are the operator's lb_try_duration, lb_try_interval and lb_retries. Without a
// duration or retries, each worker is tried once.
type Limits struct {
	Duration, Interval time.Duration
	Retries            int
}

func (l Limits) Set() bool { return l.Duration > 0 || l.Retries > 0 }

// allow returns whether the limits allow another attempt. A limit of 0 allows any number.
func (l Limits) allow(start time.Time, attempts int) bool {
	return (l.Duration == 0 || time.Since(start) < l.Duration) && (l.Retries == 0 || attempts <= l.Retries)
}

// FollowUp is called once, when a request has ended. It owns the body. text is the answer's
// as JSON; nil if the answer is not whole or not all text. sent is the worker's request.
type FollowUp func(text []byte, whole *body.Replay, sent *http.Request)

// MaxKeptText bounds the text that is kept of an answer, in bytes of JSON.
const MaxKeptText = 256 << 10

// shadow is a policy that chooses beside the active one, without effect.
type shadow struct {
	policy                  kvscore.Policy
	agreed, differed, fault prometheus.Counter
}

// Dispatcher sends the requests of one configuration to the workers of its pool. It is made
// once and does not change. It has more than 15 fields: one for each part of the
// configuration.
type Dispatcher struct {
	attempt.Runner
	Proxy *reverseproxy.Handler

	Policy     kvscore.Policy
	Sessions   *turn.Sessions
	Shadow     *shadow // nil if none is configured
	Timeouts   attempt.Timeouts
	Resume     resume.Config
	Limits     Limits
	RetryMatch caddyhttp.MatcherSets // the operator's lb_retry_match
	Phases     kvscore.SplitRule     // the rule by which requests are split
	KeepBody   bool                  // other handlers may read the body after the answer's header

	Prober *discovery.Prober
	// FollowUps is called when the answer of an attempt begins. It returns nil if no request of the router's
	// own follows. Otherwise the dispatch keeps the body. held: an engine holds the session, and the
	// request has only what is new in it.
	FollowUps func(a *attempt.Attempt, held bool, resp *http.Response) FollowUp
	Client    *upstream.Client
	Backups   pool.Backups // that the handler declares; nil if there are none

	tables pool.Tables
	Series Series // of the pool
}

// Reasons of a choice.
const (
	ReasonSession  = "session" // the worker is the one that the session is bound to
	reasonOverlap  = "overlap"
	reasonLoad     = "load"
	ReasonOverflow = "overflow" // a backup, as no other worker could serve the request then
	// The request decides.
	ReasonPin      = "pin"
	ReasonResponse = "response"
)

// Fallbacks that are found after the plan was made.
const (
	FallbackUnbound     = "unbound"           // the store could not find or bind the session
	fallbackUnreadable  = "answer_unreadable" // the engine's answer cannot be read as it passes
	fallbackUnmerged    = "models_unmerged"   // a list of models lacks the other workers' models
	fallbackOmitted     = "nvext_omitted"     // the answer cannot carry what the client asked for
	FallbackUntokenized = "untokenized"       // a query's answer has no token ids, as no engine returns them
)

// Count counts a request that has ended, by its outcome.
func (s *Dispatcher) Count(outcome string) {
	requestsTotal.WithLabelValues(s.Pool.Name, outcome).Inc()
}

// FallBack records that the router lacks some knowledge for a request.
func (s *Dispatcher) FallBack(reason string) {
	fallbacksTotal.WithLabelValues(s.Pool.Name, reason).Inc()
	s.Pool.Raise(time.Now(), "fallback "+reason)
}

// CountDropped counts the grants that a request lacks for its hints, and its routing headers that
// cannot be read.
func (s *Dispatcher) CountDropped(lacks nvext.Grants, malformed []string) {
	if lacks == 0 && len(malformed) == 0 {
		return
	}
	for name := range lacks.Names {
		droppedTotal.WithLabelValues(s.Pool.Name, name).Inc()
	}
	for _, name := range malformed {
		malformedTotal.WithLabelValues(s.Pool.Name, name).Inc()
	}
	if c := s.Logger.Check(zap.DebugLevel, "dropped wishes of a client that are malformed or not granted"); c != nil {
		c.Write(zap.Stringer("not_granted", lacks), zap.Strings("malformed_headers", malformed))
	}
}
