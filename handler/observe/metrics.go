package observe

import (
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// The collectors of the pools. The series of a worker go when the pool forgets it.
var (
	retriesMade = Counter("retries_total", "Retries, by the worker that failed and the reason; resend is a retry by net/http.", "worker", "reason")
	// retriesDenied counts retries that the budget did not allow.
	retriesDenied    = Counter("retries_denied_total", "Retries that the retry budget did not allow.")
	cachesCleared    = Counter("cache_model_cleared_total", "How often a worker lost its KV cache and the router cleared its cache model, by reason.", "worker", "reason")
	unfetched        = Counter("unfetched_prompts_total", "Prompts that the worker computed for decode workers and that none of these got.", "worker")
	predictionErrors = Histogram("prediction_error_tokens", []float64{0, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536},
		"Absolute difference between predicted and reported cached tokens.", "worker")
	engineSessionCalls = Counter("engine_sessions_total", "Sessions that engines opened and closed for the router, by outcome.", "action", "outcome")
)

// maxLabels is how many names have series of their own.
const maxLabels = 1024

// Labels bound the values of a label that clients name.
type Labels struct {
	mu    sync.Mutex
	names map[string]bool
}

// Label returns the value for a name. Those that come after the first maxLabels share one.
func (l *Labels) Label(name string) string {
	name = strings.ToValidUTF8(name, "�") // as label values must be
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.names[name]:
		return name
	case len(l.names) >= maxLabels:
		return "other"
	case l.names == nil:
		l.names = make(map[string]bool)
	}
	name = strings.Clone(name) // a request may hold it
	l.names[name] = true
	return name
}

// collectors are all that Counter and Histogram have made.
var collectors []prometheus.Collector

// Collectors returns the collectors of the process, to be registered.
func Collectors() []prometheus.Collector { return collectors }

// Counter makes a collector of counters. It is for variables of packages: counts survive reloads. The
// first label is the pool.
func Counter(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "kv_router", Name: name, Help: help,
	}, append([]string{"pool"}, labels...))
	collectors = append(collectors, c)
	return c
}

// Histogram makes a collector of histograms, as Counter does.
func Histogram(name string, buckets []float64, help string, labels ...string) *prometheus.HistogramVec {
	c := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "caddy", Subsystem: "kv_router", Name: name, Help: help, Buckets: buckets,
	}, append([]string{"pool"}, labels...))
	collectors = append(collectors, c)
	return c
}

// deleteSeries deletes the series with these labels.
func deleteSeries(labels prometheus.Labels) {
	for _, c := range Collectors() {
		if vec, ok := c.(interface{ DeletePartialMatch(prometheus.Labels) int }); ok {
			vec.DeletePartialMatch(labels)
		}
	}
}

// RetryDenied counts n retries in a pool that the budget did not allow.
func RetryDenied(pool string, n int) { retriesDenied.WithLabelValues(pool).Add(float64(n)) }

// EngineSession counts a session that an engine was asked to open or close.
func EngineSession(pool, action, outcome string) {
	engineSessionCalls.WithLabelValues(pool, action, outcome).Inc()
}

// Why a worker's cache model was cleared.
const (
	ClearedRefused   = "refused"   // nothing listened at its address
	ClearedRestarted = "restarted" // its engine has restarted, or is another one
	ClearedAsleep    = "asleep"    // its engine sleeps
	ClearedReset     = "reset"     // a request has reset it
	ClearedMismatch  = "mismatch"  // it reports far fewer cached tokens than predicted
)

// Retried counts n retries of attempts on the worker.
func (w *Worker) Retried(reason string, n int) {
	retriesMade.WithLabelValues(w.pool, w.dial, reason).Add(float64(n))
}

// Cleared counts that the worker has lost its KV cache.
func (w *Worker) Cleared(why string) { cachesCleared.WithLabelValues(w.pool, w.dial, why).Inc() }

// Unfetched counts a prompt that the worker computed and no decode worker got.
func (w *Worker) Unfetched() { unfetched.WithLabelValues(w.pool, w.dial).Inc() }

// Mispredicted records by how many tokens a prediction of cached tokens was off.
func (w *Worker) Mispredicted(tokens int64) {
	predictionErrors.WithLabelValues(w.pool, w.dial).Observe(float64(tokens))
}

// FromZero creates the series of the worker: Prometheus does not see the first event of a series that
// begins with it.
func (w *Worker) FromZero() {
	for _, reason := range []string{"refused", "broken", "first_token", "hung", "404", "429", "502", "503", "529", "resend", "reconnect"} {
		w.Retried(reason, 0)
	}
	for _, why := range []string{ClearedRefused, ClearedRestarted, ClearedReset, ClearedMismatch} {
		cachesCleared.WithLabelValues(w.pool, w.dial, why)
	}
	unfetched.WithLabelValues(w.pool, w.dial)
}

// Forget deletes the series of the worker, and those of one that had another id at its address.
func (w *Worker) Forget() {
	w.ForgetMetrics()
	deleteSeries(prometheus.Labels{"pool": w.pool, "worker": w.dial})
}
