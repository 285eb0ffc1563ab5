package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"time"
)

// machine is how well this computer kept up. Times are in seconds of the engines, but
// for took.
type machine struct {
	late    float64 // the 99th percentile of how late timers fire
	outside []extra // the least first
	took    time.Duration
}

// extra is the part of the mean time to first token that the engines do not see. The
// router, the client and the machine take this time.
type extra struct {
	name string // of the contender
	time float64
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

// overhead returns the mean TTFT outside the engines for each contender, the least
// first. Where engines die, it would count the retries, so that workload is left out.
func overhead(cells [][]*cell) []extra {
	list := make([]extra, len(cells[0]))
	n := 0.0
	for _, row := range cells {
		if row[0].runs[0].load.deaths > 0 {
			continue
		}
		for i, c := range row {
			list[i].name = c.name
			for _, r := range c.runs {
				list[i].time += r.outside().Seconds()
			}
		}
		n += float64(len(row[0].runs))
	}
	for i := range list {
		list[i].time /= max(n, 1)
	}
	slices.SortFunc(list, func(a, b extra) int { return cmp.Compare(a.time, b.time) })
	return list
}

func (m *machine) write(w io.Writer, cells [][]*cell) {
	least, most := m.outside[0], m.outside[len(m.outside)-1]
	fmt.Fprintf(w, "Outside the engines passed %.3f s (%s) to %.3f s (%s)\n"+
		"of a mean TTFT: router, client and this machine of %d cores. The demo took %.0f s.\n",
		least.time, least.name, most.time, most.name, runtime.NumCPU(), m.took.Seconds())
	best := math.Inf(1)
	for _, list := range cells {
		for _, c := range list {
			best = min(best, c.mean.median)
		}
	}
	if most.time > mostLate || m.late > mostLate || most.time > best/4 {
		fmt.Fprintln(w, "WARNING: this machine is too slow or busy for the times above.")
	}
}
