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
	stateUnreachable = "unreachable" // it refuses connections, or does not answer
	stateHung        = "hung"
	stateMarked      = "marked down"
	stateRecovering  = "recovering" // it gets a few requests after a mark
	stateUnhealthy   = "unhealthy"  // Caddy's health checks have taken it out
	stateUntried     = "untried"
)

func stateOf(w *worker.Worker, h *worker.HealthState, proxy map[string]proxyState, idle bool) string {
	of, said := proxy[w.Dial]
	switch {
	case w.Asleep():
		return stateAsleep
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
	case h.Reach == worker.ReachUnknown:
		return stateUntried
	}
	return stateOK
}

// ofState returns why a worker is in its state, and what to do. Both are empty if it is well.
func ofState(w *worker.Worker, state string, h *worker.HealthState, t time.Time) (note observe.Warning) {
	note.What = state
	switch state {
	case stateUnreachable:
		note.Effect, note.Advice = "It refuses connections, or does not answer.", "Look at the engine, its host and the network."
	case stateHung:
		note.Effect, note.Advice = "It has requests and produces no output, while others do.", "Restart the engine."
	case stateMarked:
		note.Effect = fmt.Sprintf("It gets no requests for %s.", age(h.Until.Sub(t).Seconds()))
		note.Advice = "If it goes on, read the engine's log."
	case stateRecovering:
		note.Effect, note.Advice = "It failed, and gets a few requests at a time.", "Nothing. If it goes on, read the engine's log."
	case stateUnhealthy:
		note.Effect, note.Advice = "Caddy's health checks have taken it out.", "Ask the engine for the path of health_uri."
	case stateDraining, stateDrained:
		note.Effect, note.Advice = "The configuration drains it.", "Remove drain there."
		if asked, _ := w.Drains(); asked {
			note.Effect, note.Advice = "An operator has drained it.", "End it with: caddy kv-router undrain "+w.Dial
		}
		return note
	default:
		return note
	}
	if why := w.Past.Fault(); why != "" && state != stateHung {
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
		n := len(group)
		paces, lates, hits, fails := make([]float64, 0, n), make([]float64, 0, n), make([]float64, 0, n), make([]float64, 0, n)
		for _, i := range group {
			c := list[i].compared(&sums[i])
			paces, lates, hits, fails = append(paces, c.pace), append(lates, c.lateness), append(hits, c.hits), append(fails, c.failing)
		}
		usual := compared{pace: median(paces, false), lateness: median(lates, false), hits: median(hits, true), failing: median(fails, false)}
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

func (w *workerView) addAnomalies(s *observe.Sums, usual *compared) {
	own := w.compared(s)
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
