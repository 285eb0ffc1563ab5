package pool

import "github.com/prometheus/client_golang/prometheus"

// The collectors of the pools. The series of a worker go when the pool forgets it.
var (
	retriesMade = poolCounter("retries_total", "Retries, by the worker that failed and the reason; resend is a retry by net/http.", "worker", "reason")
	// retriesDenied counts retries that the budget did not allow.
	retriesDenied      = poolCounter("retries_denied_total", "Retries that the retry budget did not allow.")
	cachesCleared      = poolCounter("cache_model_cleared_total", "How often a worker lost its KV cache and the router cleared its cache model, by reason.", "worker", "reason")
	unfetched          = poolCounter("unfetched_prompts_total", "Prompts that the worker computed for decode workers and that none of these got.", "worker")
	engineSessionCalls = poolCounter("engine_sessions_total", "Sessions that engines opened and closed for the router, by outcome.", "action", "outcome")
)

func poolCounter(name, help string, labels ...string) *prometheus.CounterVec {
	opts := prometheus.CounterOpts{Namespace: "caddy", Subsystem: "kv_router", Name: name, Help: help}
	return prometheus.NewCounterVec(opts, append([]string{"pool"}, labels...))
}

// Collectors returns the collectors of the pools, to be registered.
func Collectors() []prometheus.Collector {
	return []prometheus.Collector{
		retriesMade, retriesDenied, cachesCleared, unfetched, engineSessionCalls, workerOutcomes, workerTokens, workerTTFT, workerITL,
	}
}

// CountRetries counts n retries of attempts on a worker.
func (p *Pool) CountRetries(w *Worker, reason string, n int) {
	retriesMade.WithLabelValues(p.Name, w.Dial, reason).Add(float64(n))
}

// CountUnfetched counts a prompt that a prefill worker computed and no decode worker got.
func (p *Pool) CountUnfetched(w *Worker) { unfetched.WithLabelValues(p.Name, w.Dial).Inc() }

// CountSession counts a session that an engine was asked to open or close.
func (p *Pool) CountSession(action, outcome string) {
	engineSessionCalls.WithLabelValues(p.Name, action, outcome).Inc()
}

// countFromZero creates the series of a worker: Prometheus does not see the first event
// of a series that begins with it.
func (p *Pool) countFromZero(w *Worker) {
	for _, reason := range []string{"refused", "broken", "first_token", "hung", "404", "429", "503", "529", "resend", "reconnect"} {
		p.CountRetries(w, reason, 0)
	}
	for _, why := range []string{clearedRefused, clearedRestarted, clearedMismatch} {
		cachesCleared.WithLabelValues(p.Name, w.Dial, why)
	}
	unfetched.WithLabelValues(p.Name, w.Dial)
}

// forgetCounts deletes the series of a worker.
func (p *Pool) forgetCounts(w *Worker) {
	labels := prometheus.Labels{"pool": p.Name, "worker": w.Dial}
	retriesMade.DeletePartialMatch(labels)
	cachesCleared.DeletePartialMatch(labels)
	unfetched.DeletePartialMatch(labels)
	p.forgetFigures(w, true)
	deleteFigures(labels) // also those of a worker that had another id
}
