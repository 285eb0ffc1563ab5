package main

import (
	"math"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/stats"
)

// figures are those of one run. Times are in seconds of the engines.
type figures struct {
	hits      float64 // % of the prompt tokens
	mean, p99 float64 // TTFT
	rate      float64 // answers in a minute
}

// summarize returns the figures of some answers; all zero if there are none.
func summarize(samples []sample) (f figures) {
	if len(samples) == 0 {
		return f
	}
	prompt, cached, end := 0, 0, time.Duration(0)
	ttft := make([]float64, len(samples))
	for i, s := range samples {
		prompt, cached = prompt+s.prompt, cached+s.cached
		end = max(end, s.end)
		ttft[i] = s.ttft.Seconds()
		f.mean += ttft[i] / float64(len(samples))
	}
	slices.Sort(ttft)
	f.hits = 100 * float64(cached) / float64(max(prompt, 1))
	f.rate = float64(len(samples)) / end.Minutes()
	f.p99 = stats.Percentile(ttft, 0.99)
	return f
}

// same is the most that two mean TTFTs differ, as a ratio, and count as equal.
const same = 1.05

// verdict is how a contender compares with ours.
type verdict int

const (
	none    verdict = iota // kv_router itself, or nothing to compare
	tie                    // within 5 %
	unclear                // the seeds disagree
	win                    // ours is faster
	loss                   // ours is slower
)

// compare judges the ratios of a contender's mean TTFT to ours, one for each seed. It
// is a tie if the median is near 1, and unclear if the seeds do not agree.
func compare(s stats.Spread) verdict {
	switch {
	case s.Median == 0 || math.IsNaN(s.Median):
		return none
	case s.Median <= same && s.Median >= 1/same:
		return tie
	case s.Least > 1:
		return win
	case s.Most < 1:
		return loss
	}
	return unclear
}

// Requests are normal again if the median TTFT of a bin after a death is low enough. It is
// compared with the median of the turns before the first death. These have cold caches,
// so their median hardly depends on the contender.
const (
	bin    = 5 * time.Second // its length
	normal = 1.5             // times the median before the first death, at most
)

// recovery returns how long after a death the requests of some runs were not normal, all
// deaths taken together. The time ends with the last failure or the last bin whose median
// TTFT was too long. recovery returns false if they were not normal before the next death.
func recovery(runs []*run) (time.Duration, bool) {
	w := runs[0].load
	bins := make([][]float64, (w.death(1)-w.death(0))/bin)
	var before []float64
	last := time.Duration(0)
	for _, r := range runs {
		for _, at := range r.trouble {
			last = max(last, sinceDeath(w, at))
		}
		for _, s := range r.samples {
			switch i := int(sinceDeath(w, s.at) / bin); {
			case s.at < w.death(0):
				before = append(before, s.ttft.Seconds())
			case i < len(bins):
				bins[i] = append(bins[i], s.ttft.Seconds())
			}
		}
	}
	limit := normal * stats.Of(before).Median
	for i, list := range bins {
		if stats.Of(list).Median > limit {
			last = max(last, time.Duration(i+1)*bin)
		}
	}
	return last, last < time.Duration(len(bins))*bin
}

// sinceDeath returns how long before a time the latest death was.
func sinceDeath(w *workload, at time.Duration) time.Duration {
	for i := w.deaths - 1; i > 0; i-- {
		if at >= w.death(i) {
			return at - w.death(i)
		}
	}
	return at - w.death(0)
}
