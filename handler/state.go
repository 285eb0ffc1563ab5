package handler

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	descIncidents = desc("incidents", "Conditions that last at this moment, each 1.", "pool", "condition")
	descHung      = desc("workers_hung", "Whether the worker was found to hang: nothing comes from it while others make progress.", "pool", "worker")
	descAvailable = desc("worker_available", "Whether the worker gets new requests as others do: 0 while no connection to it can be made, it is rated down or let back, hangs, is drained, or Caddy's health checks have taken it out.", "pool", "worker")
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

// collectState tells of what an operator would act on. Of workers that are no
// upstreams any more there is nothing to be told.
func collectState(ch chan<- prometheus.Metric) {
	t := time.Now()
	for _, p := range thePools() {
		for _, in := range p.incidents.view(t) { // their names are a fixed few
			collect(ch, descIncidents, prometheus.GaugeValue, 1, p.name, in.What)
		}
		s, proxy := p.settings.Load(), p.proxyHealthy()
		for _, w := range p.all() {
			if !p.isCurrent(s, w) {
				continue
			}
			gauge := func(d *prometheus.Desc, v float64, labels ...string) {
				collect(ch, d, prometheus.GaugeValue, v, append([]string{p.name, w.dial}, labels...)...)
			}
			if yes := w.health.state(t).available(w, proxy); yes != nil {
				gauge(descAvailable, asNumber(*yes))
			}
			e := p.engineView(w)
			gauge(descEngine, 1, orEmpty(e.Type), orEmpty(e.Version), e.Source)
			if e.Contradictions != nil {
				gauge(descContrary, float64(len(e.Contradictions)))
			}
			gauge(descHung, asNumber(w.flow.hangs()))
		}
	}
}

// available tells whether the worker gets new requests as others do: one that is
// let back, with a few at a time, does not yet. It is nil if that is not known, as
// no connection to it was tried. proxy is what proxyHealthy returns.
func (s healthState) available(w *worker, proxy map[string]bool) *bool {
	healthy, said := proxy[w.dial]
	yes := (healthy || !said) && !w.draining() && !w.flow.hangs() && s.well && !s.away
	if yes && s.reach == reachUnknown {
		return nil
	}
	return &yes
}

func asNumber(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
