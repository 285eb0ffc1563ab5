package dispatch

import (
	"errors"
	"sync"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// Metrics are the collectors. They are made once per process, so that counts
// survive reloads, and registered with each configuration's registry.
type Metrics struct {
	requests, fallbacks         *prometheus.CounterVec
	shadow, shadowFaults        *prometheus.CounterVec
	ttft, itl                   *prometheus.HistogramVec
	inputTokens, outputTokens   *prometheus.HistogramVec
	predictedHits, reportedHits *prometheus.HistogramVec
	turnedAway                  *prometheus.CounterVec
	unsupported                 *prometheus.CounterVec
	compared                    *prometheus.CounterVec
	queueWait                   *prometheus.HistogramVec
	dropped, malformed          *prometheus.CounterVec
	Speculative                 *prometheus.CounterVec
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

// Figures are the collectors that each request moves, for one pool.
type Figures struct {
	Requests                    map[string]prometheus.Counter // by outcome
	ttft, itl                   prometheus.Observer
	inputTokens, outputTokens   prometheus.Observer
	predictedHits, reportedHits prometheus.Observer
	turnedAway                  map[string]prometheus.Counter // by the error's code
	// of answers that tell what was cached, in tokens
	comparedPrompt, comparedPredicted, comparedReported prometheus.Counter
	queueWait                                           prometheus.Observer
}

// Of returns the figures of a pool.
func (m *Metrics) Of(pool string) *Figures {
	f := &Figures{
		Requests: make(map[string]prometheus.Counter),
		ttft:     m.ttft.WithLabelValues(pool), itl: m.itl.WithLabelValues(pool),
		inputTokens: m.inputTokens.WithLabelValues(pool), outputTokens: m.outputTokens.WithLabelValues(pool),
		predictedHits: m.predictedHits.WithLabelValues(pool), reportedHits: m.reportedHits.WithLabelValues(pool),
		comparedPrompt: m.compared.WithLabelValues(pool, "prompt"), comparedPredicted: m.compared.WithLabelValues(pool, "predicted"),
		comparedReported: m.compared.WithLabelValues(pool, "reported"),
		queueWait:        m.queueWait.WithLabelValues(pool),
		turnedAway: map[string]prometheus.Counter{
			api.CodeQueueFull:    m.turnedAway.WithLabelValues(pool, "full"),
			api.CodeQueueTimeout: m.turnedAway.WithLabelValues(pool, "timeout"),
		},
	}
	for _, grant := range nvext.GrantNames() {
		m.dropped.WithLabelValues(pool, grant)
	}
	for _, outcome := range []string{
		outcomeOK, outcomeEngineError, outcomeUnavailable, outcomeBroken, outcomeClientGone, OutcomeRejected, outcomeQueueRejected, OutcomeUnreadable, OutcomeQuery,
	} {
		f.Requests[outcome] = m.requests.WithLabelValues(pool, outcome)
	}
	return f
}

var AllMetrics = sync.OnceValue(func() *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "caddy", Subsystem: "kv_router", Name: name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "caddy", Subsystem: "kv_router", Name: name, Help: help, Buckets: buckets,
		}, []string{"pool"})
	}
	ratio := prometheus.LinearBuckets(0, 0.05, 21)
	return &Metrics{
		requests:      counter("requests_total", "Requests by what became of them.", "pool", "outcome"),
		fallbacks:     counter("fallbacks_total", "Requests routed with less than full knowledge, by what was missing.", "pool", "reason"),
		shadow:        counter("shadow_total", "Choices that the shadow policy was asked for, too, by whether it made the same.", "pool", "agreed"),
		shadowFaults:  counter("shadow_faults_total", "Choices of the shadow policy that were none.", "pool"),
		turnedAway:    counter("queue_rejected_total", "Requests that found all workers full and were turned away: too many waited, or they themselves too long.", "pool", "reason"),
		dropped:       counter("nvext_dropped_total", "Requests of which something was dropped that their clients are not trusted with, by what that is.", "pool", "grant"),
		malformed:     counter("nvext_malformed_headers_total", "Routing headers that cannot be read and were passed over.", "pool", "header"),
		unsupported:   counter("nvext_unsupported_total", "Fields of nvext that an attempt was made without, for the engine takes nothing of the kind.", "pool", "engine", "field"),
		Speculative:   counter("speculative_total", "Turns whose clients asked for the next one's prefix to be computed beforehand, by what became of that.", "pool", "outcome"),
		queueWait:     histogram("queue_wait_seconds", "Time that a request waited while all workers were full, of those that waited.", prometheus.ExponentialBucketsRange(0.005, 300, 14)),
		compared:      counter("compared_tokens_total", "Of answers that tell what was cached: tokens of the prompt, predicted and reported as cached.", "pool", "tokens"),
		ttft:          histogram("time_to_first_token_seconds", "Time from the request to the first token of a streamed answer.", prometheus.ExponentialBucketsRange(0.001, 480, 18)),
		itl:           histogram("inter_token_latency_seconds", "Mean time between the chunks of a streamed answer, once per answer.", prometheus.ExponentialBucketsRange(0.001, 2, 13)),
		inputTokens:   histogram("input_tokens", "Prompt tokens as the engines reported them.", prometheus.ExponentialBucketsRange(50, 128000, 12)),
		outputTokens:  histogram("output_tokens", "Generated tokens as the engines reported them.", prometheus.ExponentialBucketsRange(50, 32000, 10)),
		predictedHits: histogram("predicted_hit_ratio", "Share of the prompt that the chosen worker was thought to hold.", ratio),
		reportedHits:  histogram("reported_hit_ratio", "Share of the prompt that the engine reported as cached.", ratio),
	}
})

// Register registers the collectors of requests and others. Several handlers may do so.
func Register(r *prometheus.Registry, logger *zap.Logger, others ...prometheus.Collector) *Metrics {
	m := AllMetrics()
	for _, c := range append(append(pool.Collectors(), others...), []prometheus.Collector{
		m.requests, m.fallbacks, m.shadow, m.shadowFaults, m.ttft, m.itl, m.inputTokens, m.outputTokens,
		m.predictedHits, m.reportedHits, m.compared, m.turnedAway, m.unsupported, m.queueWait, m.dropped, m.malformed, m.Speculative,
	}...) {
		var already prometheus.AlreadyRegisteredError
		if err := r.Register(c); err != nil && !errors.As(err, &already) {
			logger.Error("registering metrics; serving without these", zap.Error(err))
		}
	}
	return m
}

// CountDropped counts the wishes of a request that were dropped, and its routing headers
// that cannot be read.
func (s *Dispatcher) CountDropped(p *plan.Plan) {
	for name := range p.Dropped.Names {
		s.Metrics.dropped.WithLabelValues(s.Pool.Name, name).Inc()
	}
	for _, name := range p.Malformed {
		s.Metrics.malformed.WithLabelValues(s.Pool.Name, name).Inc()
	}
	if p.Dropped == 0 && len(p.Malformed) == 0 {
		return
	}
	if c := s.Logger.Check(zap.DebugLevel, "wishes of a client are dropped"); c != nil {
		c.Write(zap.Stringer("not_granted", p.Dropped), zap.Strings("malformed_headers", p.Malformed))
	}
}
