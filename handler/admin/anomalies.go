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
func stateOf(w *worker.Worker, h *worker.HealthState, proxy map[string]proxyState, idle bool, t time.Time) observe.Warning {
	of, said := proxy[w.Dial]
	failed := func(what, effect, advice string) observe.Warning {
		if why := w.Past.Fault(); why != "" {
			effect += " Its last failure: " + why + "."
		}
		return observe.Warning{What: what, Effect: effect, Advice: advice}
	}
	switch asked, _ := w.Drains(); {
	case w.Asleep():
		return observe.Warning{What: stateAsleep}
	case w.Draining():
		note := observe.Warning{What: stateDraining, Effect: "The configuration drains it.", Advice: "Remove drain there."}
		if asked {
			note.Effect, note.Advice = "An operator has drained it.", "End it with: caddy kv-router undrain "+w.Dial
		}
		if idle {
			note.What = stateDrained
		}
		return note
	case h.Away:
		return failed(stateUnreachable, "It refuses connections, or does not answer.", "Look at the engine, its host and the network.")
	case w.IsHung():
		return observe.Warning{What: stateHung, Effect: "It has requests and produces no output, while others do.", Advice: "Restart the engine."}
	case !h.Until.IsZero():
		return failed(stateMarked, fmt.Sprintf("It gets no requests for %s.", age(h.Until.Sub(t).Seconds())),
			"If it goes on, look at its last failure, and read the engine's log.")
	case !h.Well:
		return failed(stateRecovering, "It failed, and gets a few requests at a time.",
			"Nothing. If it goes on, look at its last failure, and read the engine's log.")
	case said && !of.healthy:
		return failed(stateUnhealthy, "Caddy's health checks have taken it out.", "Ask the engine for the path of health_uri.")
	case h.Reach == worker.ReachUnknown:
		return observe.Warning{What: stateUntried}
	}
	return observe.Warning{What: stateOK}
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

// What a worker is compared by.
const (
	pace     = iota // time between tokens
	lateness        // of prefills, in relation to the prediction
	hits            // hit ratio
	failing         // share of attempts
	figures
)

// compared are a worker's figures. NaN is unknown, and neither above nor below anything.
type compared [figures]float64

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
		var usual compared
		for figure := range usual {
			usual[figure] = median(all, figure)
		}
		for n, i := range group {
			list[i].addAnomalies(&sums[i], &all[n], &usual)
		}
	}
}

// median returns the median of what is known, of an even number the better one. Fewer than two have none.
func median(list []compared, figure int) float64 {
	var all []float64
	for i := range list {
		if f := list[i][figure]; !math.IsNaN(f) {
			all = append(all, f)
		}
	}
	if len(all) < 2 {
		return math.NaN()
	}
	slices.Sort(all)
	if figure == hits {
		return all[len(all)/2]
	}
	return all[(len(all)-1)/2]
}

func (w *workerView) compared(s *observe.Sums) compared {
	c := compared{math.NaN(), math.NaN(), math.NaN(), math.NaN()}
	if s.Attempts >= fewTries || s.Failed >= fewFails {
		c[failing] = float64(s.Failed) / float64(s.Attempts)
	}
	if w.needsLook() || s.Active < fewSlots {
		return c // its figures are those of another time
	}
	if s.Paces >= fewSamples {
		c[pace] = w.Recent.Pace
	}
	if w.slowness > 0 {
		c[lateness] = w.slowness
	}
	if s.Reports >= fewSamples && w.Recent.Hits != nil {
		c[hits] = *w.Recent.Hits
	}
	return c
}

func (w *workerView) addAnomalies(s *observe.Sums, own, usual *compared) {
	found := func(what, effect, advice string) {
		w.Anomalies = append(w.Anomalies, what)
		w.Look = append(w.Look, observe.Warning{What: what, Effect: effect, Advice: advice})
	}
	slowTokens := usual[pace] > 0 && own[pace] > 2*usual[pace]
	slowPrefills := own[lateness] > 2*max(1, usual[lateness])
	// Few hits as predicted are those of its prompts: of an application without a common beginning, or of
	// a worker that conversations leave. Prefills of what was predicted as cached make a worker slow.
	cold := own[hits] < usual[hits]-0.2 && 2*s.Cached < s.Predicted
	const compareIt = "Compare its GPU, clocks, settings and other clients with the others'. If it is too slow, drain it."
	switch {
	case cold:
	case slowTokens:
		found(anomalySlow, fmt.Sprintf("%s between tokens, its peers %s.", millis(own[pace]), millis(usual[pace])), compareIt)
	case slowPrefills:
		found(anomalySlow, fmt.Sprintf("Its prefills take %.1f times as long as predicted, its peers' %.1f times.", own[lateness], usual[lateness]), compareIt)
	}
	fails := s.Failed >= fewFails && own[failing] > max(0.1, 3*usual[failing])
	if fails || w.Health.ErrorsApart && usual[failing] < 1 {
		found(anomalyFailing, fmt.Sprintf("%d of %d attempts failed, of its peers' %.0f %%. %.0f %% of its last answers are errors or empty.",
			s.Failed, s.Attempts, 100*usual[failing], 100*w.Health.ErrorRatio), "Read the engine's log, or drain it.")
	}
	if cold {
		found(anomalyCold, fmt.Sprintf("%.0f %% of its prompt tokens were cached, of its peers' %.0f %%, of its own as predicted %s.",
			100*own[hits], 100*usual[hits], percent(w.Recent.Foreseen)), "Look at its prefix caching and the size of its KV cache.")
	}
}
