package discovery

import "github.com/prometheus/client_golang/prometheus"

// The series of a worker go when the pool forgets it.
var predictionErrors = prometheus.NewHistogramVec(prometheus.HistogramOpts{
	Namespace: "caddy", Subsystem: "kv_router", Name: "prediction_error_tokens",
	Help:    "Absolute difference between predicted and reported cached tokens.",
	Buckets: []float64{0, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536},
}, []string{"pool", "worker"})

// Collectors returns the collectors of all pools, to be registered.
func Collectors() []prometheus.Collector { return []prometheus.Collector{predictionErrors} }
