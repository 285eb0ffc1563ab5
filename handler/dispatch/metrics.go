package dispatch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// Metrics are the collectors. They are made once per process, so that counts
// survive reloads, and registered with each configuration's registry.
type Metrics struct {
	all                       []prometheus.Collector
	requests, fallbacks       *prometheus.CounterVec
	shadow, shadowFaults      *prometheus.CounterVec
	ttft, itl, plain          *prometheus.HistogramVec
	inputTokens, outputTokens *prometheus.HistogramVec
	turnedAway                *prometheus.CounterVec
	unsupported               *prometheus.CounterVec
	queueWait                 *prometheus.HistogramVec
	dropped, malformed        *prometheus.CounterVec
	turns, moves              *prometheus.CounterVec
	phases                    *prometheus.CounterVec
	phaseTimes                *prometheus.HistogramVec
	resumed, stayed           *prometheus.CounterVec
	promises                  *prometheus.CounterVec
	predictions               *prometheus.HistogramVec
	users                     users
	Tenants                   observe.Labels // of requests that wait
}

// Outcomes of a request.
const (
	outcomeOK            = "ok"              // answered with a status below 400
	outcomeEngineError   = "engine_error"    // the engine's own error reached the client
	outcomeUnavailable   = "unavailable"     // no worker could be reached
	outcomeBroken        = "broken"          // the answer broke off on the engine's side
	outcomeClientGone    = "client_gone"     // the client left first
	OutcomeRejected      = "rejected"        // answered with our own 4xx, or 503 as no worker is what it asks for
	outcomeQueueRejected = "queue_rejected"  // answered with our own 429 or 503, as all workers were full
	OutcomeUnreadable    = "body_unreadable" // the client's body could not be read
	OutcomeQuery         = "query"           // a query, which is answered with the choice
)

// Series are the times and tokens of one pool's requests.
type Series struct {
	ttft, itl, plain, queueWait, inputTokens, outputTokens prometheus.Observer
}

// Begin creates a pool's series of known labels: Prometheus does not see the first event of a series that begins
// with it.
func (m *Metrics) Begin(pool string) Series {
	for _, outcome := range []string{
		outcomeOK, outcomeEngineError, outcomeUnavailable, outcomeBroken, outcomeClientGone,
		OutcomeRejected, outcomeQueueRejected, OutcomeUnreadable, OutcomeQuery,
	} {
		m.requests.WithLabelValues(pool, outcome)
	}
	for _, phase := range []string{split.PhasePrefill, split.PhaseDecode} {
		m.phaseTimes.WithLabelValues(pool, phase)
		for _, outcome := range []string{phaseOK, phaseFailed, phaseCanceled} {
			m.phases.WithLabelValues(pool, phase, outcome)
		}
	}
	for _, reason := range []string{turnedAwayFull, turnedAwayBackground, turnedAwayTimeout, turnedAwayLate} {
		m.turnedAway.WithLabelValues(pool, reason)
	}
	for _, state := range turn.States {
		m.turns.WithLabelValues(pool, string(state))
	}
	for _, reason := range []string{movedGone, movedFailed, movedUnavailable, movedCost} {
		m.moves.WithLabelValues(pool, reason)
	}
	for _, grant := range nvext.GrantNames() {
		m.dropped.WithLabelValues(pool, grant)
	}
	of := func(h *prometheus.HistogramVec) prometheus.Observer { return h.WithLabelValues(pool) }
	return Series{of(m.ttft), of(m.itl), of(m.plain), of(m.queueWait), of(m.inputTokens), of(m.outputTokens)}
}

// Know creates the series of classes with a target, as Begin does. It ends those of classes that are gone.
func (m *Metrics) Know(pool string, classes map[string]bool, gone []string) {
	for class := range classes {
		for _, outcome := range []string{promiseKept, promiseLate, promisePlain, promiseDemoted, promiseRefused} {
			m.promises.WithLabelValues(pool, class, outcome)
		}
	}
	for _, class := range gone {
		m.promises.DeletePartialMatch(prometheus.Labels{"pool": pool, "class": class})
		m.predictions.DeletePartialMatch(prometheus.Labels{"pool": pool, "class": class})
	}
}

// Why the queue refused requests.
const (
	turnedAwayFull       = "full"
	turnedAwayBackground = "background" // it was full for background classes
	turnedAwayTimeout    = "timeout"
	turnedAwayLate       = "late"
)

// PhaseEnded counts a phase of a request over two workers.
func (s *Dispatcher) PhaseEnded(name string, err error, took time.Duration) {
	outcome := phaseOK
	switch {
	case errors.Is(err, context.Canceled):
		outcome = phaseCanceled
	case err != nil:
		outcome = phaseFailed
	default:
		s.Metrics.phaseTimes.WithLabelValues(s.Pool.Name, name).Observe(took.Seconds())
	}
	s.Metrics.phases.WithLabelValues(s.Pool.Name, name, outcome).Inc()
}

// AllMetrics makes the collectors at its first call.
var AllMetrics = sync.OnceValue(func() *Metrics {
	m := new(Metrics)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "caddy", Subsystem: "kv_router", Name: name, Help: help,
		}, append([]string{"pool"}, labels...))
		m.all = append(m.all, c)
		return c
	}
	histogram := func(name string, buckets []float64, help string, labels ...string) *prometheus.HistogramVec {
		c := prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "caddy", Subsystem: "kv_router", Name: name, Help: help, Buckets: buckets,
		}, append([]string{"pool"}, labels...))
		m.all = append(m.all, c)
		return c
	}
	m.requests = counter("requests_total", "Requests by outcome.", "outcome")
	m.users.requests = counter("user_requests_total", "Requests of authenticated users, by outcome.", "user", "outcome")
	m.users.tokens = counter("user_tokens_total",
		"Tokens that the engines reported to authenticated users: prompt, cached of these, and output.", "user", "tokens")
	m.fallbacks = counter("fallbacks_total", "Requests routed with less than full knowledge, by reason.", "reason")
	m.shadow = counter("shadow_total",
		"Choices that the shadow policy made, too, by whether it chose the same worker.", "agreed")
	m.shadowFaults = counter("shadow_faults_total", "Choices of the shadow policy that were invalid.")
	m.turnedAway = counter("queue_rejected_total",
		"Requests that the queue rejected: it was full, also for background classes; they waited too long; or they would have been late.", "reason")
	m.dropped = counter("nvext_dropped_total",
		"Requests of which the router dropped something that trust does not grant, by grant.", "grant")
	m.malformed = counter("nvext_malformed_headers_total",
		"Routing headers that could not be read and were ignored.", "header")
	m.unsupported = counter("nvext_unsupported_total",
		"Attempts without an nvext field, because the engine or the API does not support it.", "engine", "field")
	m.turns = counter("session_turns_total", "Answered turns of sessions, by what became of the session.", "state")
	m.moves = counter("session_moves_total", "Sessions that moved to another target, by reason.", "reason")
	m.resumed = counter("resumed_total",
		"Streams that broke off and were asked for at another worker, by cause, by what was asked for, and by whether they went on.",
		"cause", "way", "outcome")
	m.stayed = counter("resume_refused_total", "Streams that broke off and did not go on elsewhere, by reason.", "reason")
	m.phases = counter("phases_total", "Phases of requests over two workers, by outcome.", "phase", "outcome")
	m.promises = counter("promises_total", "Requests of classes with a target of the time to the first token, by outcome.", "class", "outcome")

	times := prometheus.ExponentialBucketsRange
	m.queueWait = histogram("queue_wait_seconds", times(0.005, 300, 14), "Time in the queue, of requests that waited.")
	m.ttft = histogram("time_to_first_token_seconds", times(0.001, 480, 18),
		"Time from the request to the first token of a streamed answer.")
	m.plain = histogram("plain_answer_seconds", times(0.001, 480, 18), "Time from the request to the end of an answer that is no stream.")
	m.itl = histogram("inter_token_latency_seconds", times(0.001, 2, 13),
		"Mean time between the chunks of a streamed answer, once per answer.")
	m.phaseTimes = histogram("phase_seconds", times(0.001, 480, 18), "Time of the phases of requests over two workers.", "phase")
	m.predictions = histogram("predicted_ratio", []float64{0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4, 10},
		"Predicted time to the first token, as a multiple of the true one, of streams with a class.", "class")
	m.inputTokens = histogram("input_tokens", times(50, 128000, 12), "Prompt tokens as the engines reported them.")
	m.outputTokens = histogram("output_tokens", times(50, 32000, 10), "Generated tokens as the engines reported them.")
	return m
})

// Outcomes of phases.
const (
	phaseOK       = "ok"
	phaseFailed   = "failed"
	phaseCanceled = "canceled" // the client left, or the other phase failed
)

// Register registers the collectors of requests and others. Several handlers may do so.
func Register(r *prometheus.Registry, logger *zap.Logger, others ...prometheus.Collector) *Metrics {
	m := AllMetrics()
	for _, c := range slices.Concat(observe.Collectors(), m.all, others) {
		var already prometheus.AlreadyRegisteredError
		if err := r.Register(c); err != nil && !errors.As(err, &already) {
			logger.Error("registering metrics failed; the router serves without them", zap.Error(err))
		}
	}
	return m
}

// Reasons why a session moved from its home.
const (
	movedGone        = "gone"        // home is no upstream any more
	movedFailed      = "failed"      // home failed to serve this turn
	movedUnavailable = "unavailable" // home is marked down, hung or draining
	movedCost        = "cost"        // another target was cheaper, and home holds little of the prompt
	movedContext     = "context"     // the prompt has outgrown home's context
)

// users counts what each user does. A user is a client whom Caddy has authenticated.
type users struct {
	requests, tokens *prometheus.CounterVec
	observe.Labels
}

func (u *users) add(pool, name, kind string, tokens int64) {
	if tokens > 0 { // -1 is unknown
		u.tokens.WithLabelValues(pool, name, kind).Add(float64(tokens))
	}
}
