package dispatch

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// The collectors of requests.
var (
	times = prometheus.ExponentialBucketsRange

	requestsTotal = observe.Counter("requests_total", "Requests by outcome.", "outcome")
	userRequests  = observe.Counter("user_requests_total", "Requests of authenticated users, by outcome.", "user", "outcome")
	userTokens    = observe.Counter("user_tokens_total",
		"Tokens that the engines reported to authenticated users: prompt, cached of these, and output.", "user", "tokens")
	fallbacksTotal = observe.Counter("fallbacks_total", "Requests routed with less than full knowledge, by reason.", "reason")
	shadowTotal    = observe.Counter("shadow_total",
		"Choices that the shadow policy made, too, by whether it chose the same worker.", "agreed")
	shadowFaults  = observe.Counter("shadow_faults_total", "Choices of the shadow policy that were invalid.")
	rejectedTotal = observe.Counter("queue_rejected_total",
		"Requests that the queue rejected: it was full, also for background classes; they waited too long; or they would have been late.", "reason")
	droppedTotal = observe.Counter("nvext_dropped_total",
		"Requests of which the router dropped something that trust does not grant, by grant.", "grant")
	malformedTotal = observe.Counter("nvext_malformed_headers_total",
		"Routing headers that could not be read and were ignored.", "header")
	unsupportedTotal = observe.Counter("nvext_unsupported_total",
		"Attempts without an nvext field, because the engine or the API does not support it.", "engine", "field")
	turnsTotal   = observe.Counter("session_turns_total", "Answered turns of sessions, by what became of the session.", "state")
	movesTotal   = observe.Counter("session_moves_total", "Sessions that moved to another target, by reason.", "reason")
	resumedTotal = observe.Counter("resumed_total",
		"Streams that broke off and were asked for at another worker, by cause, by what was asked for, and by whether they went on.",
		"cause", "way", "outcome")
	notResumedTotal = observe.Counter("resume_refused_total", "Streams that broke off and did not go on elsewhere, by reason.", "reason")
	phasesTotal     = observe.Counter("phases_total", "Phases of requests over two workers, by outcome.", "phase", "outcome")
	promisesTotal   = observe.Counter("promises_total", "Requests of classes with a target of the time to the first token, by outcome.", "class", "outcome")

	queueWaits = observe.Histogram("queue_wait_seconds", times(0.005, 300, 14), "Time in the queue, of requests that waited.")
	ttftTimes  = observe.Histogram("time_to_first_token_seconds", times(0.001, 480, 18),
		"Time from the request to the first token of a streamed answer.")
	plainTimes = observe.Histogram("plain_answer_seconds", times(0.001, 480, 18), "Time from the request to the end of an answer that is no stream.")
	itlTimes   = observe.Histogram("inter_token_latency_seconds", times(0.001, 2, 13),
		"Mean time between the chunks of a streamed answer, once per answer.")
	phaseTimes      = observe.Histogram("phase_seconds", times(0.001, 480, 18), "Time of the phases of requests over two workers.", "phase")
	predictedRatios = observe.Histogram("predicted_ratio", []float64{0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4, 10},
		"Predicted time to the first token, as a multiple of the true one, of streams with a class.", "class")
	inputTokens  = observe.Histogram("input_tokens", times(50, 128000, 12), "Prompt tokens as the engines reported them.")
	outputTokens = observe.Histogram("output_tokens", times(50, 32000, 10), "Generated tokens as the engines reported them.")
)

// TenantLabels are of the tenants of requests that wait, userLabels of authenticated users.
var TenantLabels, userLabels observe.Labels

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

// NewSeries creates a pool's series of known labels: Prometheus does not see the first event of a series that begins
// with it.
func NewSeries(pool string) Series {
	for _, outcome := range []string{
		outcomeOK, outcomeEngineError, outcomeUnavailable, outcomeBroken, outcomeClientGone,
		OutcomeRejected, outcomeQueueRejected, OutcomeUnreadable, OutcomeQuery,
	} {
		requestsTotal.WithLabelValues(pool, outcome)
	}
	for _, phase := range []string{split.PhasePrefill, split.PhaseDecode} {
		phaseTimes.WithLabelValues(pool, phase)
		for _, outcome := range []string{phaseOK, phaseFailed, phaseCanceled} {
			phasesTotal.WithLabelValues(pool, phase, outcome)
		}
	}
	for _, reason := range []string{turnedAwayFull, turnedAwayBackground, turnedAwayTimeout, turnedAwayLate} {
		rejectedTotal.WithLabelValues(pool, reason)
	}
	for _, state := range turn.States {
		turnsTotal.WithLabelValues(pool, string(state))
	}
	for _, reason := range []string{movedGone, movedFailed, movedUnavailable, movedCost} {
		movesTotal.WithLabelValues(pool, reason)
	}
	for _, grant := range nvext.GrantNames() {
		droppedTotal.WithLabelValues(pool, grant)
	}
	of := func(h *prometheus.HistogramVec) prometheus.Observer { return h.WithLabelValues(pool) }
	return Series{of(ttftTimes), of(itlTimes), of(plainTimes), of(queueWaits), of(inputTokens), of(outputTokens)}
}

// KnowClasses creates the series of classes with a target, as NewSeries does. It ends those of classes that are gone.
func KnowClasses(pool string, classes map[string]bool, gone []string) {
	for class := range classes {
		for _, outcome := range []string{promiseKept, promiseLate, promisePlain, promiseDemoted, promiseRefused} {
			promisesTotal.WithLabelValues(pool, class, outcome)
		}
	}
	for _, class := range gone {
		promisesTotal.DeletePartialMatch(prometheus.Labels{"pool": pool, "class": class})
		predictedRatios.DeletePartialMatch(prometheus.Labels{"pool": pool, "class": class})
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
		phaseTimes.WithLabelValues(s.Pool.Name, name).Observe(took.Seconds())
	}
	phasesTotal.WithLabelValues(s.Pool.Name, name, outcome).Inc()
}

// Outcomes of phases.
const (
	phaseOK       = "ok"
	phaseFailed   = "failed"
	phaseCanceled = "canceled" // the client left, or the other phase failed
)

// Register registers the collectors of the process and others. Several handlers may do so.
func Register(r *prometheus.Registry, logger *zap.Logger, others ...prometheus.Collector) {
	for _, c := range slices.Concat(observe.Collectors(), others) {
		var already prometheus.AlreadyRegisteredError
		if err := r.Register(c); err != nil && !errors.As(err, &already) {
			logger.Error("registering metrics failed; the router serves without them", zap.Error(err))
		}
	}
}

// Reasons why a session moved to another target.
const (
	movedGone        = "gone"        // its worker is no upstream any more
	movedFailed      = "failed"      // its worker failed to serve this turn
	movedUnavailable = "unavailable" // its worker is marked down, hung or draining
	movedCost        = "cost"        // another target was cheaper, and its target caches little of the prompt
	movedContext     = "context"     // the prompt has outgrown the context of its worker
)

func countTokens(pool, name, kind string, tokens int64) {
	if tokens > 0 { // -1 is unknown
		userTokens.WithLabelValues(pool, name, kind).Add(float64(tokens))
	}
}
