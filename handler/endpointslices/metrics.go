package endpointslices

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Collector reads the watchers when metrics are scraped.
type Collector struct{}

var (
	descAge = desc("age_seconds",
		"Time since the API server last reported the pods of the Kubernetes service. At most 60 while all is well.")
	descFailures = desc("failures_total", "Failed calls of the Kubernetes API server.")
)

func desc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("caddy_kv_router_kubernetes_"+name, help, []string{"service"}, nil)
}

// Describe implements prometheus.Collector.
func (Collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- descAge
	ch <- descFailures
}

// Collect implements prometheus.Collector. Before the first list, a service has failures only.
func (Collector) Collect(ch chan<- prometheus.Metric) {
	seen := make(map[string]bool)
	watchers.Range(func(_, value any) bool {
		w := value.(*watcher)
		of := w.of.String()
		if seen[of] { // another API server has one of this name, too
			return true
		}
		seen[of] = true
		ch <- prometheus.MustNewConstMetric(descFailures, prometheus.CounterValue, float64(w.failures.Load()), of)
		if w.known.Load() != nil {
			age := time.Since(time.Unix(0, w.confirmed.Load()))
			ch <- prometheus.MustNewConstMetric(descAge, prometheus.GaugeValue, age.Seconds(), of)
		}
		return true
	})
}
