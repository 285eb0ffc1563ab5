package admin

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// The states of a worker.
const (
	stateOK          = "ok"
	stateDraining    = "draining"
	stateDrained     = "drained"
	stateAsleep      = "asleep"
	stateUnreachable = "unreachable"
	stateHung        = "hung"
	stateMarked      = "marked down"
	stateRecovering  = "recovering"
	stateUnhealthy   = "unhealthy"
	stateUntried     = "untried"
)

// stateOf returns a worker's state and, unless it is well, why it is in it and what to do.
func stateOf(w *worker.Worker, h *worker.HealthState, proxy map[string]proxyState, idle bool, t time.Time) (note observe.Warning) {
	of, said := proxy[w.Dial]
	switch {
	case w.Asleep():
		note.What = stateAsleep
	case w.Draining():
		note = observe.Warning{What: stateDraining, Effect: "The configuration drains it.", Advice: "Remove drain there."}
		if asked, _ := w.Drains(); asked {
			note.Effect, note.Advice = "An operator has drained it.", "End it with: caddy kv-router undrain "+w.Dial
		}
		if idle {
			note.What = stateDrained
		}
	case h.Away:
		note.What, note.Advice = stateUnreachable, "Look at the engine, its host and the network."
		note.Effect = "It refuses connections, or does not answer."
	case w.IsHung():
		note.What, note.Advice = stateHung, "Restart the engine."
		note.Effect = "It has requests and produces no output, while others do."
		return note
	case !h.Until.IsZero():
		note.What, note.Advice = stateMarked, "If it goes on, look at its last failure, and read the engine's log."
		note.Effect = fmt.Sprintf("It gets no requests for %s.", age(h.Until.Sub(t).Seconds()))
	case !h.Well:
		note.What, note.Advice = stateRecovering, "Nothing. If it goes on, look at its last failure, and read the engine's log."
		note.Effect = "It failed, and gets a few requests at a time."
	case said && !of.healthy:
		note.What, note.Advice = stateUnhealthy, "Ask the engine for the path of health_uri."
		note.Effect = "Caddy's health checks have taken it out."
	case h.Reach == worker.ReachUnknown:
		note.What = stateUntried
	default:
		note.What = stateOK
	}
	if why := w.Past.Fault(); why != "" && note.Effect != "" && !w.Draining() {
		note.Effect += " Its last failure: " + why + "."
	}
	return note
}

// The anomalies of a worker that differs from its peers.
const (
	anomalySlow    = "slow"    // twice their time between tokens, or prefills twice as late as theirs
	anomalyFailing = "failing" // more than 10 % of its attempts fail, and three times as many as theirs
	anomalyCold    = "cold"    // a hit ratio 20 points below theirs, and less than half of what was predicted

	fewSamples = 30 // answers that show how quick and how warm a worker is
	fewSlots   = 3  // slots of ten seconds in which they came
	fewTries   = 10 // attempts that show how many fail, or
	fewFails   = 3  // failures
)

// compared is what a worker is compared by. NaN is unknown, and neither above nor below anything.
type compared struct {
	pace     float64 // time between tokens
	lateness float64 // of prefills, in relation to the prediction
	hits     float64 // hit ratio
	failing  float64 // share of attempts
}

// findAnomalies compares each worker with those that serve the same models and are well. Without enough
// samples of both there is no anomaly. Times to first token say little here: they depend on the prompts and
// the load.
func findAnomalies(list []workerView, sums []observe.Sums) {
	groups := make(map[string][]int)
	for i := range list {
		key := strings.Join(list[i].Models.names(), "\n")
		groups[key] = append(groups[key], i)
	}
	for _, group := range groups {
		all := make([]compared, len(group))
		for n, i := range group {
			all[n] = list[i].compared(&sums[i])
		}
		usual := compared{
			pace:     median(all, func(c *compared) float64 { return c.pace }, false),
			lateness: median(all, func(c *compared) float64 { return c.lateness }, false),
			hits:     median(all, func(c *compared) float64 { return c.hits }, true),
			failing:  median(all, func(c *compared) float64 { return c.failing }, false),
		}
		for n, i := range group {
			list[i].addAnomalies(&sums[i], &all[n], &usual)
		}
	}
}

// median returns the median of what is known; of an even number the lower or the upper one. Fewer
// than two have none.
func median(list []compared, of func(*compared) float64, upper bool) float64 {
	all := make([]float64, 0, len(list))
	for i := range list {
		if f := of(&list[i]); !math.IsNaN(f) {
			all = append(all, f)
		}
	}
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
	c := compared{math.NaN(), math.NaN(), math.NaN(), math.NaN()}
	if s.Attempts >= fewTries || s.Failed >= fewFails {
		c.failing = float64(s.Failed) / float64(s.Attempts)
	}
	if w.needsLook() || s.Active < fewSlots {
		return c // its figures are those of another time
	}
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

func (w *workerView) addAnomalies(s *observe.Sums, own, usual *compared) {
	found := func(what, effect, advice string) {
		w.Anomalies = append(w.Anomalies, what)
		w.Look = append(w.Look, observe.Warning{What: what, Effect: effect, Advice: advice})
	}
	slowTokens := usual.pace > 0 && own.pace > 2*usual.pace
	slowPrefills := own.lateness > 2*max(1, usual.lateness)
	// Few hits as predicted are those of its prompts: of an application without a common beginning, or of
	// a worker that conversations leave. Prefills of what was predicted as cached make a worker slow.
	cold := own.hits < usual.hits-0.2 && 2*s.Cached < s.Predicted
	const compareIt = "Compare its GPU, clocks, settings and other clients with the others'. If it is too slow, drain it."
	switch {
	case cold:
	case slowTokens:
		found(anomalySlow, fmt.Sprintf("%s between tokens, its peers %s.", millis(own.pace), millis(usual.pace)), compareIt)
	case slowPrefills:
		found(anomalySlow, fmt.Sprintf("Its prefills take %.1f times as long as predicted, its peers' %.1f times.", own.lateness, usual.lateness), compareIt)
	}
	failing := s.Failed >= fewFails && own.failing > max(0.1, 3*usual.failing)
	if failing || w.Health.ErrorsApart && usual.failing < 1 {
		found(anomalyFailing, fmt.Sprintf("%d of %d attempts failed, of its peers' %.0f %%. %.0f %% of its last answers are errors or empty.",
			s.Failed, s.Attempts, 100*usual.failing, 100*w.Health.ErrorRatio), "Read the engine's log, or drain it.")
	}
	if cold {
		found(anomalyCold, fmt.Sprintf("%.0f %% of its prompt tokens were cached, of its peers' %.0f %%, of its own as predicted %s.",
			100*own.hits, 100*usual.hits, percent(w.Recent.Foreseen)), "Look at its prefix caching and the size of its KV cache.")
	}
}
