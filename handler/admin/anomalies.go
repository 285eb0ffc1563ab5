package admin

import (
	"math"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// The states of a worker.
const (
	stateOK          = "ok"
	stateDraining    = "draining"
	stateDrained     = "drained"
	stateUnreachable = "unreachable" // it refuses connections, or does not answer
	stateHung        = "hung"
	stateMarked      = "marked down"
	stateRecovering  = "recovering" // it gets a few requests after a mark
	stateUnhealthy   = "unhealthy"  // Caddy's health checks have taken it out
	stateFull        = "full"
	stateUntried     = "untried"
)

func stateOf(w *worker.Worker, h *worker.HealthState, proxy map[string]proxyState, idle, full bool) string {
	of, said := proxy[w.Dial]
	switch {
	case w.Draining() && idle:
		return stateDrained
	case w.Draining():
		return stateDraining
	case h.Away:
		return stateUnreachable
	case w.IsHung():
		return stateHung
	case !h.Until.IsZero():
		return stateMarked
	case !h.Well:
		return stateRecovering
	case said && !of.healthy:
		return stateUnhealthy
	case full:
		return stateFull
	case h.Reach == worker.ReachUnknown:
		return stateUntried
	}
	return stateOK
}

// The anomalies of a worker that differs from its peers.
const (
	anomalySlow    = "slow"    // twice their time between tokens, or prefills twice as late as theirs
	anomalyFailing = "failing" // more than 10 % of its attempts fail
	anomalyCold    = "cold"    // a hit ratio 20 points below theirs, and no other anomaly

	fewSamples = 10
)

// compared is what a worker is compared by. NaN is unknown, and neither above nor below anything.
type compared struct {
	pace     float64 // time between tokens
	lateness float64 // of prefills, in relation to the prediction
	hits     float64 // hit ratio
}

// findAnomalies compares each worker with those that serve the same models. Without enough samples a
// worker has no anomaly. Times to first token say little here: they depend on the prompts and the load.
func findAnomalies(list []workerView, sums []observe.Sums) {
	groups := make(map[string][]int)
	for i := range list {
		key := strings.Join(list[i].Models.names(), "\n")
		groups[key] = append(groups[key], i)
	}
	for _, group := range groups {
		n := len(group)
		paces, lates, hits := make([]float64, 0, n), make([]float64, 0, n), make([]float64, 0, n)
		for _, i := range group {
			c := list[i].compared(&sums[i])
			paces, lates, hits = append(paces, c.pace), append(lates, c.lateness), append(hits, c.hits)
		}
		usual := compared{pace: median(paces, false), lateness: median(lates, false), hits: median(hits, true)}
		for _, i := range group {
			list[i].addAnomalies(&sums[i], &usual)
		}
	}
}

// median returns the median of what is known; of an even number the lower or the upper one. Fewer
// than two have none.
func median(all []float64, upper bool) float64 {
	all = slices.DeleteFunc(all, math.IsNaN)
	if len(all) < 2 {
		return math.NaN()
	}
	slices.Sort(all)
	if upper {
		return all[len(all)/2]
	}
	return all[(len(all)-1)/2]
}

func (w *workerView) compared(s *observe.Sums) compared {
	c := compared{math.NaN(), math.NaN(), math.NaN()}
	if s.Paces >= fewSamples {
		c.pace = w.Recent.Pace
	}
	if w.slowness > 0 {
		c.lateness = w.slowness
	}
	if s.Reports >= fewSamples && w.Recent.Hits != nil {
		c.hits = *w.Recent.Hits
	}
	return c
}

func (w *workerView) addAnomalies(s *observe.Sums, usual *compared) {
	own := w.compared(s)
	slowTokens := usual.pace > 0 && own.pace > 2*usual.pace
	slowPrefills := own.lateness > 2*max(1, usual.lateness)
	cold := own.hits < usual.hits-0.2
	// Prefills of what was predicted as cached make a worker slow. Conversations that leave a slow or
	// failing worker make it cold, as predicted. The cause is the anomaly.
	mispredicted := cold && 2*s.Cached < s.Predicted
	if (slowTokens || slowPrefills) && !mispredicted {
		w.Anomalies = append(w.Anomalies, anomalySlow)
	}
	if r := &w.Recent; r.Failed >= 3 && 10*r.Failed > r.Attempts && !slices.Contains(w.Anomalies, anomalyFailing) {
		w.Anomalies = append(w.Anomalies, anomalyFailing)
	}
	if cold && len(w.Anomalies) == 0 {
		w.Anomalies = append(w.Anomalies, anomalyCold)
	}
}
