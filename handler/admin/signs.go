package admin

import (
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
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

func stateOf(w *pool.Worker, h *pool.HealthState, proxy map[string]proxyState, idle, full bool) string {
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
	case h.Reach == pool.ReachUnknown:
		return stateUntried
	}
	return stateOK
}

// The signs of a worker that differs from its peers. The alerts have the same bounds.
const (
	signSlow    = "slow"    // twice their time between tokens, or twice the predicted prefill time while theirs is as predicted
	signFailing = "failing" // more than 10 % of its attempts fail
	signCold    = "cold"    // a hit ratio 20 points below theirs, and no other sign

	fewSamples = 10
)

// findApart compares each worker with those that serve the same models. Without enough samples a
// worker has no sign. Times to first token say little here: they depend on the prompts and the load.
func findApart(list []workerState, sums []pool.Sums) {
	groups := make(map[string][]int)
	for i := range list {
		key := strings.Join(list[i].Models, "\n")
		groups[key] = append(groups[key], i)
	}
	for _, group := range groups {
		median := func(of func(i int) (v float64, known bool), upper bool) float64 {
			var all []float64
			for _, i := range group {
				if v, known := of(i); known {
					all = append(all, v)
				}
			}
			if slices.Sort(all); len(all) < 2 {
				return 0
			} else if upper {
				return all[len(all)/2]
			}
			return all[(len(all)-1)/2]
		}
		pace := func(i int) (float64, bool) { return list[i].Recent.Pace, sums[i].Paces >= fewSamples }
		hits := func(i int) (float64, bool) {
			if sums[i].Reports < fewSamples || list[i].Recent.Hits == nil {
				return 0, false
			}
			return *list[i].Recent.Hits, true
		}
		late := func(i int) (float64, bool) { return list[i].slowness, list[i].slowness > 0 }
		steps, held, usual := median(pace, false), median(hits, true), max(1, median(late, false))
		for _, i := range group {
			w := &list[i]
			r := &w.Recent
			s, known := pace(i)
			h, ok := hits(i)
			slow, cold := known && steps > 0 && s > 2*steps || w.slowness > 2*usual, ok && h < held-0.2
			// Prefills that were not predicted make a worker slow. Conversations that leave a slow or
			// failing worker make it cold, as predicted. The cause has the sign.
			surprised := cold && 2*sums[i].Cached < sums[i].Predicted
			if slow && !surprised {
				w.Signs = append(w.Signs, signSlow)
			}
			if r.Failed >= 3 && 10*r.Failed > r.Attempts && !slices.Contains(w.Signs, signFailing) {
				w.Signs = append(w.Signs, signFailing)
			}
			if cold && len(w.Signs) == 0 {
				w.Signs = append(w.Signs, signCold)
			}
		}
	}
}
