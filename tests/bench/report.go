package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"text/tabwriter"

	"github.com/caddy-kvrouter/kvrouter/tests/stats"
)

// baseline is whom the ratios are to by default.
const baseline = "caddy"

// digits writes a figure with three digits, as far as they stand behind the point.
func digits(x float64) string {
	if math.IsNaN(x) {
		return "–"
	}
	before := 0
	if x >= 1 {
		before = 1 + int(math.Log10(x))
	}
	return strconv.FormatFloat(x, 'f', max(0, 3-before), 64)
}

// figures returns what a contender showed in a cell, by round, without what could not
// be measured.
func (m *meter) figures(contender, cell string, get func(*sample) float64) map[int]float64 {
	list := make(map[int]float64)
	for _, s := range m.samples {
		if s.contender == contender && s.cell == cell && !math.IsNaN(get(s)) {
			list[s.round] = get(s)
		}
	}
	return list
}

// entry is one place of a table: median, least and most, the ratio with its quartiles, and a
// mark if there were errors.
func (m *meter) entry(contender, cell string, get func(*sample) float64) string {
	values, base := m.figures(contender, cell, get), m.figures(m.base, cell, get)
	own, ratios := make([]float64, 0, len(values)), make([]float64, 0, len(values))
	for round, x := range values {
		own = append(own, x)
		if y := base[round]; y != 0 {
			ratios = append(ratios, x/y)
		}
	}
	text := "–"
	if len(own) > 0 {
		s := stats.Of(own)
		text = fmt.Sprintf("%s (%s..%s)", digits(s.Median), digits(s.Least), digits(s.Most))
	}
	if contender != m.base && len(ratios) > 0 {
		slices.Sort(ratios)
		text += fmt.Sprintf(" %sx (%s..%s)", digits(stats.Of(ratios).Median),
			digits(stats.Percentile(ratios, 0.25)), digits(stats.Percentile(ratios, 0.75)))
	}
	for _, s := range m.samples {
		if s.contender == contender && s.cell == cell && s.errors > 0 {
			return text + " !"
		}
	}
	return text
}

// write writes the report: for each metric a row for each cell and a column for each
// contender.
func (m *meter) write(out io.Writer, incomplete error) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "Median (least..most) of %d rounds; x: median (quartiles) of the rounds' ratios to %s of the same round.\n", m.rounds, m.base)
	if _, err := processTree(0); err != nil {
		fmt.Fprintf(w, "CPU time is NOT AVAILABLE on this system: %v.\n", err)
	}
	if incomplete != nil {
		fmt.Fprintf(w, "\nINCOMPLETE: %v\n", incomplete)
	}
	for _, metric := range []struct {
		title string
		get   func(*sample) float64
	}{
		{"CPU time per request, ms", func(s *sample) float64 { return s.cpu }},
		{"Requests per second", func(s *sample) float64 { return s.rate }},
		{"Latency p50, ms", func(s *sample) float64 { return s.p50 }},
		{"Latency p99, ms", func(s *sample) float64 { return s.p99 }},
	} {
		fmt.Fprintf(w, "\n%s\n", metric.title)
		for _, con := range m.contenders {
			fmt.Fprintf(w, "\t%s", con.name)
		}
		fmt.Fprintln(w)
		for _, c := range m.cells {
			fmt.Fprint(w, c.name)
			for _, con := range m.contenders {
				fmt.Fprintf(w, "\t%s", m.entry(con.name, c.name, metric.get))
			}
			fmt.Fprintln(w)
		}
	}
	errors, example := 0, ""
	for _, s := range m.samples {
		if s.errors > 0 {
			errors, example = errors+s.errors, fmt.Sprintf("%s: %v", s.contender, s.firstError)
		}
	}
	if errors > 0 {
		fmt.Fprintf(w, "\n! %d errors, such as that of %s\n", errors, example)
	} else {
		fmt.Fprint(w, "\nNo contender had errors.\n")
	}
	return w.Flush()
}
