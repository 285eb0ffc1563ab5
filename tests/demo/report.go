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
// others are compared with.
func report(out io.Writer, results []*result) {
	writeTable(out, table(results))
	base := results[0].figures
	for _, r := range results[1:] {
		f := r.figures
		fmt.Fprintf(out, "\n%s: %.1f times the hit ratio of %s, mean TTFT %.1f times shorter, whole answers %.1f times sooner.",
			r.name, ratio(f.hits, base.hits), results[0].name, ratio(base.mean.Seconds(), f.mean.Seconds()),
			ratio(base.total.Seconds(), f.total.Seconds()))
	}
	fmt.Fprintf(out, "\n\nAn engine's cache holds %.0f %% of the conversations that were under way at once.\n",
		100*float64(kvTokens)/float64(max(results[len(results)-1].peak, 1)))
	for _, r := range results {
		r.explain(out)
	}
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
	row("requests", func(r *result) string { return strconv.Itoa(r.asked) })
	for i := range results[0].requests {
		row(fmt.Sprintf("  received by e%d", i+1), func(r *result) string { return strconv.Itoa(r.requests[i]) })
	}
	row("failed requests", func(r *result) string { return strconv.Itoa(r.failed) })
	row("broken streams", func(r *result) string { return strconv.Itoa(r.broken) })
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
	// What the engines did not see of the time to first token.
	own := max(0, r.figures.mean-time.Duration(r.engineTTFT*float64(time.Millisecond)))
	lag := time.Duration(r.lag * float64(time.Millisecond))
	if own > r.figures.mean/4 || lag > r.figures.worst/2 {
		fmt.Fprintf(out, "WARNING: this machine does not keep up, so the times are not to be trusted (%s: steps up to %s late, %s of the mean TTFT spent outside the engines). "+
			"Let it do nothing else, or try a lower -speed.\n", r.name, seconds(lag), seconds(own))
	}
}
