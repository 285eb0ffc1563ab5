package handler

import "github.com/prometheus/client_golang/prometheus"

var (
	descIncidents = desc("incidents", "Conditions that last at this moment, each 1.", "pool", "condition")
	descHung      = desc("workers_hung", "Whether the worker was found to hang: nothing comes from it while others make progress.", "pool", "worker")
	descAvailable = desc("worker_available", "Whether the worker gets new requests: 0 while it is rated down or drained.", "pool", "worker")
	descEngine    = desc("worker_engine_info", "What the worker is, as configured or found; always 1.", "pool", "worker", "engine", "version", "source")
	descContrary  = desc("worker_contradictions", "Settings of the worker that its engine contradicts.", "pool", "worker")
)

func describeState(ch chan<- *prometheus.Desc) {
	ch <- descIncidents
	ch <- descAvailable
	ch <- descEngine
	ch <- descContrary
	ch <- descHung
}

// collectState tells of what an operator would act on.
func collectState(ch chan<- prometheus.Metric) {
	t := now()
	for _, p := range thePools() {
		for _, in := range p.incidents.view(t) { // their names are a fixed few
			ch <- prometheus.MustNewConstMetric(descIncidents, prometheus.GaugeValue, 1, p.name, in.What)
		}
		for _, w := range p.all() {
			available := 0.0
			if !w.draining() && w.health.available(t) {
				available = 1
			}
			ch <- prometheus.MustNewConstMetric(descAvailable, prometheus.GaugeValue, available, p.name, w.dial)
			e := p.engineView(w)
			ch <- prometheus.MustNewConstMetric(descEngine, prometheus.GaugeValue, 1, p.name, w.dial, orEmpty(e.Type), orEmpty(e.Version), e.Source)
			ch <- prometheus.MustNewConstMetric(descContrary, prometheus.GaugeValue, float64(len(e.Contradictions)), p.name, w.dial)
			hung := 0.0
			if w.flow.hangs() {
				hung = 1
			}
			ch <- prometheus.MustNewConstMetric(descHung, prometheus.GaugeValue, hung, p.name, w.dial)
		}
	}
}
