package main

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"time"
)

// machine is how well this computer kept up.
type machine struct {
	late float64 // the 99th percentile of how late timers fire, in seconds of the engines
	// outside are the least and the most of the mean time to first token that the
	// engines do not see, over the contenders; in seconds of the engines.
	outside spread
	took    time.Duration // in real time
}

// mostLate is what a machine that keeps up stays below, in seconds of the engines.
const mostLate = 0.1

// pulse is how often a timer is tried.
const pulse = 5 * time.Millisecond

// watch tries timers until the function that it returns is called, which returns how
// late they fired, 99th percentile, in seconds of real time.
func watch() (stop func() float64) {
	end, late := make(chan struct{}), make(chan float64)
	go func() {
		var all []float64
		for {
			due := time.Now().Add(pulse)
			select {
			case <-time.After(pulse):
				all = append(all, time.Since(due).Seconds())
			case <-end:
				slices.Sort(all)
				if len(all) == 0 {
					all = []float64{0}
				}
				late <- quantile(all, 0.99)
				return
			}
		}
	}()
	return func() float64 {
		close(end)
		return <-late
	}
}

// overhead returns the spread, over the contenders, of the mean TTFT outside the
// engines. Where engines die, it would count the retries, so that workload is left out.
func overhead(cells [][]*cell) spread {
	sums := make(map[string]float64)
	n := 0.0
	for _, list := range cells {
		if list[0].runs[0].load.deaths > 0 {
			continue
		}
		for _, c := range list {
			for _, r := range c.runs {
				sums[c.name] += r.outside().Seconds()
			}
		}
		n += float64(len(list[0].runs))
	}
	values := make([]float64, 0, len(sums))
	for _, x := range sums {
		values = append(values, x/max(n, 1))
	}
	return over(values, func(x float64) float64 { return x })
}

func (m *machine) write(w io.Writer, cells [][]*cell) {
	fmt.Fprintf(w, "This machine (%d cores) adds %.3f to %.3f s to a mean TTFT, by contender; its\ntimers are %.2f s late (p99). The demo took %.0f s of real time.\n",
		runtime.NumCPU(), m.outside.least, m.outside.most, m.late, m.took.Seconds())
	best := math.Inf(1)
	for _, list := range cells {
		for _, c := range list {
			best = min(best, c.mean.median)
		}
	}
	if m.outside.most > mostLate || m.late > mostLate || m.outside.most > best/4 {
		fmt.Fprintln(w, "WARNING: that is much, compared with the times above. Is the machine busy?")
	}
}
