package pool

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// The collectors of the pools. The series of a worker go when the pool forgets it.
var (
	retriesMade = poolCounter("retries_total", "Retries, by the worker that failed and the reason; resend is a retry by net/http.", "worker", "reason")
	// retriesDenied counts retries that the budget did not allow.
	retriesDenied      = poolCounter("retries_denied_total", "Retries that the retry budget did not allow.")
	cachesCleared      = poolCounter("cache_model_cleared_total", "How often a worker lost its KV cache and the router cleared its cache model, by reason.", "worker", "reason")
	engineSessionCalls = poolCounter("engine_sessions_total", "Sessions that engines opened and closed for the router, by outcome.", "action", "outcome")
	eventResyncs       = poolCounter("kv_events_resyncs_total", "How often the router asked for a worker's KV events anew because the engine reported far fewer cached tokens than they said.", "worker")
	predictionErrors   = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "caddy", Subsystem: "kv_router", Name: "prediction_error_tokens",
		Help:    "Absolute difference between predicted and reported cached tokens.",
		Buckets: []float64{0, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536},
	}, []string{"pool", "worker"})
)

func poolCounter(name, help string, labels ...string) *prometheus.CounterVec {
	opts := prometheus.CounterOpts{Namespace: "caddy", Subsystem: "kv_router", Name: name, Help: help}
	return prometheus.NewCounterVec(opts, append([]string{"pool"}, labels...))
}

// Collectors returns the collectors of the pools, to be registered.
func Collectors() []prometheus.Collector {
	return []prometheus.Collector{retriesMade, retriesDenied, cachesCleared, engineSessionCalls, eventResyncs, predictionErrors}
}

// CountRetries counts n retries of attempts on a worker.
func (p *Pool) CountRetries(w *Worker, reason string, n int) {
	retriesMade.WithLabelValues(p.Name, w.Dial, reason).Add(float64(n))
}

// CountOpened counts a session that an engine opened, or failed to open.
func (p *Pool) CountOpened(opened bool) {
	outcome := "opened"
	if !opened {
		outcome = "failed"
	}
	p.countSession("open", outcome)
}

func (p *Pool) countSession(action, outcome string) {
	engineSessionCalls.WithLabelValues(p.Name, action, outcome).Inc()
}

// countFromZero creates the series of a worker: Prometheus does not see the first event
// of a series that begins with it.
func (p *Pool) countFromZero(w *Worker) {
	for _, reason := range []string{"refused", "broken", "first_token", "hung", "404", "429", "503", "529", "resend", "reconnect"} {
		p.CountRetries(w, reason, 0)
	}
	eventResyncs.WithLabelValues(p.Name, w.Dial)
	for _, why := range []string{clearedRefused, clearedRestarted, clearedMismatch} {
		cachesCleared.WithLabelValues(p.Name, w.Dial, why)
	}
}

// forgetCounts deletes the series of a worker.
func (p *Pool) forgetCounts(w *Worker) {
	labels := prometheus.Labels{"pool": p.Name, "worker": w.Dial}
	retriesMade.DeletePartialMatch(labels)
	cachesCleared.DeletePartialMatch(labels)
	eventResyncs.DeletePartialMatch(labels)
	predictionErrors.DeletePartialMatch(labels)
}

// Incidents logs conditions that last: one line when a condition begins, and one when it
// ends, however often it was raised in between.
type Incidents struct {
	mu     sync.Mutex
	byName map[string]*incident
}

type incident struct {
	Begun, Last time.Time
	Times       int
}

// incidentEnd is how long a condition must not be raised to have ended.
const incidentEnd = time.Minute

// Raise raises a condition, and logs it if it begins. The callers use few names.
func (i *Incidents) Raise(now time.Time, name string, logger func() *zap.Logger) {
	i.mu.Lock()
	known := i.byName[name]
	if known == nil {
		if i.byName == nil {
			i.byName = make(map[string]*incident)
		}
		i.byName[name] = &incident{Begun: now, Last: now, Times: 1}
	} else {
		known.Last = now
		known.Times++
	}
	i.mu.Unlock()
	if known == nil {
		logger().Warn("condition begins: " + name)
	}
}

// Open returns the conditions that have not ended, by name.
func (i *Incidents) Open() map[string]incident {
	i.mu.Lock()
	defer i.mu.Unlock()
	list := make(map[string]incident, len(i.byName))
	for name, in := range i.byName {
		list[name] = *in
	}
	return list
}

// end logs and forgets the conditions that have ended.
func (i *Incidents) end(now time.Time, logger *zap.Logger) {
	ended := make(map[string]*incident)
	i.mu.Lock()
	for name, in := range i.byName {
		if now.Sub(in.Last) >= incidentEnd {
			ended[name] = in
			delete(i.byName, name)
		}
	}
	i.mu.Unlock()
	for name, in := range ended {
		logger.Info("condition is over: "+name, zap.Int("times", in.Times), zap.Duration("lasted", in.Last.Sub(in.Begun)))
	}
}
