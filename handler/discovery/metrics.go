package discovery

import "github.com/prometheus/client_golang/prometheus"

// The series of a worker go when the pool forgets it.
var (
	eventResyncs = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "caddy", Subsystem: "kv_router", Name: "kv_events_resyncs_total",
		Help: "How often the router asked for a worker's KV events anew because the engine reported far fewer cached tokens than they said.",
	}, []string{"pool", "worker"})
	predictionErrors = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "caddy", Subsystem: "kv_router", Name: "prediction_error_tokens",
		Help:    "Absolute difference between predicted and reported cached tokens.",
		Buckets: []float64{0, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536},
	}, []string{"pool", "worker"})
)

// Collectors returns the collectors of all pools, to be registered.
func Collectors() []prometheus.Collector {
	return []prometheus.Collector{eventResyncs, predictionErrors}
}
