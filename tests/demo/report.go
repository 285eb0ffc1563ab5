package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/stats"
)

// nameWidth is the width of the column of the contenders.
const nameWidth = 17

// cell is a workload with a contender: a run for each seed.
type cell struct {
	contender
	runs     []*run
	figures  []figures
	hits     stats.Spread
	rate     stats.Spread // answers in a minute
	mean     stats.Spread
	p99      stats.Spread
	against  stats.Spread // the ratios of the mean TTFTs to ours, by seed; zero if not judged
	answered int
	asked    int
}

// newCell summarizes runs of one contender.
func newCell(runs []*run) *cell {
	c := &cell{contender: runs[0].contender, runs: runs}
	for _, r := range runs {
		c.figures = append(c.figures, summarize(r.samples))
		c.answered += len(r.samples)
		c.asked += r.load.requests()
	}
	c.hits = stats.Over(c.figures, func(f figures) float64 { return f.hits })
	c.rate = stats.Over(c.figures, func(f figures) float64 { return f.rate })
	c.mean = stats.Over(c.figures, func(f figures) float64 { return f.mean })
	c.p99 = stats.Over(c.figures, func(f figures) float64 { return f.p99 })
	return c
}

// judge compares other routers' cells of one workload with ours.
func judge(cells []*cell) {
	var base *cell
	for _, c := range cells {
		if c.name == ours {
			base = c
		}
	}
	for _, c := range cells {
		if c.own || base == nil {
			continue
		}
		ratios := make([]float64, len(c.figures))
		for i, f := range c.figures {
			if b := base.figures[i].mean; b > 0 {
				ratios[i] = f.mean / b
			}
		}
		c.against = stats.Of(ratios)
	}
}

// result is all that came of the demo.
type result struct {
	options
	cells   [][]*cell // by workload
	outside []extra   // the least first
	took    time.Duration
}

// write writes the report.
func (r *result) write(w io.Writer) {
	fmt.Fprintf(w, "%d engines: %s, simulated at %gx speed.\n", engineCount, hardware, r.speed)
	fmt.Fprintf(w, "All times are the engines' own. Median (least-most) of seeds %d to %d.\n", r.seed, r.seed+uint64(r.seeds)-1) //nolint:gosec // it is small
	for _, cells := range r.cells {
		head(w, cells[0].runs[0].load)
		for _, c := range cells {
			c.row(w)
		}
	}
	r.conclude(w)
}

// head writes the title of a workload and its columns.
func head(w io.Writer, l *workload) {
	if l.deaths > 0 {
		fmt.Fprintf(w, "\n%-*s %7s %17s %6s %6s %8s %12s\n", nameWidth+2, l.title, "hit %", "mean TTFT s", "failed", "broken", "saved", "normal in")
		return
	}
	first := "hit %"
	if l.alone {
		first = "answers/min"
	}
	fmt.Fprintf(w, "\n%-*s %13s %17s %17s  %s\n", nameWidth+2, l.title, first, "mean TTFT s", "p99 TTFT s", "mean/ids")
}

// row writes the line of a contender.
func (c *cell) row(w io.Writer) {
	if c.runs[0].load.deaths == 0 {
		first := c.hits
		if c.runs[0].load.alone {
			first = c.rate
		}
		fmt.Fprintf(w, "  %-*s %13s %17s %17s  %s\n", nameWidth, c.name, whole(first), times(c.mean), times(c.p99), c.verdict())
		return
	}
	failed, broken, saved, of := c.casualties()
	fmt.Fprintf(w, "  %-*s %7.0f %17s %6d %6d %8s %12s\n", nameWidth, c.name, c.hits.Median, times(c.mean), failed, broken,
		fmt.Sprintf("%d of %d", saved, of), c.recovered())
}

// recovered writes how long it took until the requests were normal.
func (c *cell) recovered() string {
	took, ok := recovery(c.runs)
	if !ok {
		return fmt.Sprintf("not in %.0f s", (c.runs[0].load.death(1) - c.runs[0].load.death(0)).Seconds())
	}
	return fmt.Sprintf("%.0f s", took.Seconds())
}

// casualties returns sums over the seeds: failed requests, broken answers, and the two
// counts of survivors.
func (c *cell) casualties() (failed, broken, saved, of int) {
	for _, r := range c.runs {
		s, n := r.survivors()
		failed, broken, saved, of = failed+r.failed, broken+r.broken, saved+s, of+n
	}
	return failed, broken, saved, of
}

// verdict writes how a contender compares with ours.
func (c *cell) verdict() string {
	ratio := strconv.FormatFloat(c.against.Median, 'f', 2, 64) + "x"
	switch compare(c.against) {
	case win:
		return ratio
	case loss:
		return ratio + " LOST"
	case tie:
		return ratio + " tie"
	case unclear:
		return ratio + " unclear"
	case none:
	}
	return ""
}

// digits writes a time with as many digits as are worth reading.
func digits(x float64) string {
	switch {
	case x >= 99.5:
		return strconv.FormatFloat(x, 'f', 0, 64)
	case x >= 9.95:
		return strconv.FormatFloat(x, 'f', 1, 64)
	}
	return strconv.FormatFloat(x, 'f', 2, 64)
}

// times writes seconds.
func times(s stats.Spread) string {
	return fmt.Sprintf("%s (%s-%s)", digits(s.Median), digits(s.Least), digits(s.Most))
}

// whole writes whole numbers.
func whole(s stats.Spread) string {
	return fmt.Sprintf("%.0f (%.0f-%.0f)", s.Median, s.Least, s.Most)
}

// conclude writes what the tables mean, and how far they can be believed.
func (r *result) conclude(w io.Writer) {
	counts := make(map[verdict]int)
	lacking := 0
	for _, cells := range r.cells {
		for _, c := range cells {
			if lacking += c.asked - c.answered; c.runs[0].load.deaths == 0 {
				counts[compare(c.against)]++
			}
		}
	}
	fmt.Fprintf(w, `
failed: no token came; broken: one had come. Clients ask again. saved: requests
without a token, on an engine as it died, that got an answer all the same.
normal in: no failures, and median TTFT up to %gx that before the first death.
mean/ids, a mean TTFT divided by that of %s:
%d wins, %d ties, %d unclear, %d losses.
LOST: faster than %s. tie: within %.0f %%. unclear: the seeds disagree.
`, normal, ours, counts[win], counts[tie], counts[unclear], counts[loss], ours, (same-1)*100)
	if lacking > 0 {
		fmt.Fprintf(w, "%d requests were not asked or not answered.\n", lacking)
	}
	r.judgeMachine(w)
}

// extra is the part of the mean time to first token that the engines do not see. The
// router, the client and the machine take this time.
type extra struct {
	name string  // of the contender
	time float64 // in seconds of the engines
}

// mostOutside is what a machine that keeps up stays below, in seconds of the engines.
const mostOutside = 0.1

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

// judgeMachine writes how well this computer kept up.
func (r *result) judgeMachine(w io.Writer) {
	least, most := r.outside[0], r.outside[len(r.outside)-1]
	fmt.Fprintf(w, "Outside the engines passed %.3f s (%s) to %.3f s (%s)\n"+
		"of a mean TTFT: router, client and this machine of %d cores. The demo took %.0f s.\n",
		least.time, least.name, most.time, most.name, runtime.NumCPU(), r.took.Seconds())
	best := math.Inf(1)
	for _, list := range r.cells {
		for _, c := range list {
			best = min(best, c.mean.Median)
		}
	}
	if most.time > mostOutside || most.time > best/4 {
		fmt.Fprintln(w, "WARNING: this machine is too slow or busy for the times above.")
	}
}
