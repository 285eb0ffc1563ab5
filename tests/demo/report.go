package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// What a machine that keeps up stays below, in the engines' time: the mean time to
// first token that the engines do not see, and the lateness of any of their steps.
const (
	mostOverhead = 100 * time.Millisecond
	mostLag      = time.Second
)

// figures are those of a run. Times are the engines'.
type figures struct {
	hits                       float64 // cached prompt tokens / prompt tokens
	mean, median, worst, total time.Duration
}

// summarize returns the figures of some answers; all zero of none.
func summarize(samples []sample) (f figures) {
	if len(samples) == 0 {
		return f
	}
	var prompt, cached int64
	ttft := make([]time.Duration, len(samples))
	var sum time.Duration
	for i, s := range samples {
		prompt, cached = prompt+s.prompt, cached+s.cached
		ttft[i] = s.ttft
		sum += s.ttft
		f.total += s.total
	}
	slices.Sort(ttft)
	n := time.Duration(len(samples))
	f.hits = float64(cached) / float64(max(prompt, 1))
	f.mean, f.total = sum/n, f.total/n
	f.median, f.worst = percentile(ttft, 0.5), percentile(ttft, 0.99)
	return f
}

// percentile returns the value that a share q of the sorted ones does not exceed
// (nearest rank).
func percentile(sorted []time.Duration, q float64) time.Duration {
	rank := int(math.Ceil(q * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// seconds writes a time with as many digits as are worth reading.
func seconds(d time.Duration) string {
	s := d.Seconds()
	digits := 2
	if s >= 10 {
		digits = 1
	}
	return strconv.FormatFloat(s, 'f', digits, 64) + " s"
}

// report writes the table and what follows from it. The first result is what the
// other contenders are compared with. The second one is compared with those that
// come after them.
func report(out io.Writer, results []*result) {
	writeTable(out, table(results))
	fmt.Fprintln(out)
	ours := min(1, len(results)-1)
	for i, r := range results[1:] {
		if i+1 < len(contenders) {
			compared(out, r, results[0])
		} else {
			compared(out, results[ours], r)
		}
	}
	share := 100 * float64(kvTokens) / float64(max(results[ours].peak, 1))
	fmt.Fprintf(out, "\n%s: an engine's cache holds %.0f %% of the conversations that were under way at once, those of all engines %.0f %%.\n",
		results[ours].name, share, engineCount*share)
	for _, r := range results {
		r.explain(out)
	}
}

// compared writes how a run compares with another one.
func compared(out io.Writer, r, base *result) {
	f, b := r.figures, base.figures
	fmt.Fprintf(out, "%s: %s times the hit ratio of %s, mean TTFT %s, whole answers %s.\n",
		r.name, times(ratio(f.hits, b.hits)), base.name,
		faster(f.mean, b.mean, "shorter", "longer"), faster(f.total, b.total, "sooner", "later"))
}

// faster writes how many times shorter a time is than another one, or longer.
func faster(d, base time.Duration, shorter, longer string) string {
	if d > base {
		return times(ratio(d.Seconds(), base.Seconds())) + " times " + longer
	}
	return times(ratio(base.Seconds(), d.Seconds())) + " times " + shorter
}

// times writes a ratio. Of those near 1, the second digit is of interest.
func times(x float64) string {
	if x < 2 {
		return strconv.FormatFloat(x, 'f', 2, 64)
	}
	return strconv.FormatFloat(x, 'f', 1, 64)
}

func ratio(a, b float64) float64 {
	if b == 0 {
		return math.NaN()
	}
	return a / b
}

// table returns the rows of the table, with its header.
func table(results []*result) [][]string {
	rows := [][]string{{""}}
	for _, r := range results {
		rows[0] = append(rows[0], r.name)
	}
	row := func(title string, get func(*result) string) {
		line := make([]string, 0, 1+len(results))
		line = append(line, title)
		for _, r := range results {
			line = append(line, get(r))
		}
		rows = append(rows, line)
	}
	row("hit ratio", func(r *result) string { return fmt.Sprintf("%.1f %%", 100*r.figures.hits) })
	row("TTFT mean", func(r *result) string { return seconds(r.figures.mean) })
	row("TTFT p50", func(r *result) string { return seconds(r.figures.median) })
	row("TTFT p99", func(r *result) string { return seconds(r.figures.worst) })
	row("end to end, mean", func(r *result) string { return seconds(r.figures.total) })
	row("turns answered", func(r *result) string { return fmt.Sprintf("%d of %d", len(r.samples), r.turns) })
	row("turns given up", func(r *result) string { return strconv.Itoa(r.givenUp) })
	row("requests", func(r *result) string { return strconv.Itoa(r.asked) })
	for i := range results[0].requests {
		row(fmt.Sprintf("  received by e%d", i+1), func(r *result) string { return strconv.Itoa(r.requests[i]) })
	}
	row("failed requests", func(r *result) string { return strconv.Itoa(r.failed) })
	row("broken streams", func(r *result) string { return strconv.Itoa(r.broken) })
	row("TTFT outside engines", func(r *result) string { return seconds(r.overhead) })
	row("latest engine step", func(r *result) string { return seconds(r.lag) })
	return rows
}

// writeTable writes the rows with the first column to the left and the others to
// the right.
func writeTable(out io.Writer, rows [][]string) {
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if i == 0 {
				line.WriteString(cell + pad)
			} else {
				line.WriteString("   " + pad + cell)
			}
		}
		fmt.Fprintln(out, strings.TrimRight(line.String(), " "))
	}
}

// explain writes what the table does not say of a run.
func (r *result) explain(out io.Writer) {
	if r.broken > 0 {
		fmt.Fprintf(out, "%s: %d answers had begun on the engine when it died, and ended with an error, %d of them before the first token. "+
			"They were asked again, and their times count from the first asking.\n", r.name, r.broken, r.silent)
	}
	if r.failed > 0 {
		fmt.Fprintf(out, "%s: %d requests had no answer.\n", r.name, r.failed)
	}
	if r.givenUp > 0 {
		fmt.Fprintf(out, "%s: %d turns had no whole answer in %d attempts. Their conversations ended there, so %d turns count nowhere in the times.\n",
			r.name, r.givenUp, attempts, r.turns-len(r.samples))
	}
	if r.overhead > mostOverhead || r.lag > mostLag {
		fmt.Fprintf(out, "WARNING: this machine does not keep up, so the times are not to be trusted (%s: steps up to %s late, %s of the mean TTFT spent outside the engines). "+
			"Let it do nothing else, or try a lower -speed.\n", r.name, seconds(r.lag), seconds(r.overhead))
	}
}
