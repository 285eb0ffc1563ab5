package main

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// baseline is whom the ratios are to.
const baseline = "caddy"

// metric is one table of the report.
type metric struct {
	title string
	get   func(*sample) figure
}

func metrics() []metric {
	return []metric{
		{"CPU time per request, ms", func(s *sample) figure { return s.CPU }},
		{"Requests per second", func(s *sample) figure { return s.Rate }},
		{"Latency p50, ms", func(s *sample) figure { return s.P50 }},
		{"Latency p99, ms", func(s *sample) figure { return s.P99 }},
		{"Latency p99.9, ms", func(s *sample) figure { return s.P999 }},
		{"First byte p50, ms", func(s *sample) figure { return s.FirstByte }},
		{"Peak memory, MiB", func(s *sample) figure { return s.Peak }},
	}
}

// report turns samples into tables: a row for each cell, a column for each
// contender.
type report struct {
	samples           []*sample
	contenders, cells []string
	rounds            int
	// incomplete says why there are fewer samples than rounds and cells.
	incomplete []string
	over       map[string]bool // the contenders that ended by themselves
	// noClock says why there are no CPU times and no memory; nil if there are.
	noClock error
}

// figures returns a metric by round.
func (r *report) figures(contender, cell string, get func(*sample) figure) map[int]figure {
	m := make(map[int]figure)
	for _, s := range r.samples {
		if s.Contender == contender && s.Cell == cell {
			m[s.Round] = get(s)
		}
	}
	return m
}

// errors returns how many errors a contender had, and one of them; with a cell
// named, in that cell.
func (r *report) errors(contender, cell string) (n int, example string) {
	for _, s := range r.samples {
		if s.Contender == contender && (cell == "" || s.Cell == cell) && s.Errors > 0 {
			n += s.Errors
			example = s.Error
		}
	}
	return n, example
}

// entry is one place of a table: median, min and max, the ratio, and a mark if
// there were errors.
func (r *report) entry(contender, cell string, get func(*sample) figure) string {
	values := r.figures(contender, cell, get)
	list := make([]figure, 0, len(values))
	for _, v := range values {
		list = append(list, v)
	}
	s := spreadOf(list)
	text := s.Median.text(3)
	if s.Median.known() {
		text += " (" + s.Min.text(3) + ".." + s.Max.text(3) + ")"
	}
	if contender != baseline {
		if ratio := spreadOf(ratios(values, r.figures(baseline, cell, get))); ratio.Median.known() {
			text += " " + ratio.Median.text(3) + "x"
		}
	}
	if n, _ := r.errors(contender, cell); n > 0 {
		text += " !"
	}
	return text
}

// write writes the report, as Markdown or in columns.
func (r *report) write(w io.Writer, markdown bool) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Median (min..max) of %d rounds; x: median of the rounds' ratios to %s of the same round.\n", r.rounds, baseline)
	if r.noClock != nil {
		fmt.Fprintf(&b, "CPU time and memory are NOT AVAILABLE on this system: %v.\n", r.noClock)
	}
	for _, why := range r.incomplete {
		fmt.Fprintf(&b, "\nINCOMPLETE: %s\n", strings.TrimSpace(why))
	}
	for _, m := range metrics() {
		rows := r.table(m)
		if markdown {
			fmt.Fprintf(&b, "\n### %s\n\n", m.title)
			writeMarkdown(&b, rows)
		} else {
			fmt.Fprintf(&b, "\n%s\n", m.title)
			writeColumns(&b, rows)
		}
	}
	r.writeNotes(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

// writeNotes says what must be known of the contenders beside the figures.
func (r *report) writeNotes(b *strings.Builder) {
	var kept []string
	for _, con := range r.contenders {
		for _, s := range r.samples {
			if s.Contender == con && s.PeakSinceStart {
				kept = append(kept, con)
				break
			}
		}
	}
	if len(kept) > 0 {
		fmt.Fprintf(b, "\nThe kernel refused to reset the peak memory; it is the highest since the start of %s.\n", strings.Join(kept, ", "))
	}
	failed := false
	for _, con := range r.contenders {
		if n, example := r.errors(con, ""); n > 0 {
			failed = true
			fmt.Fprintf(b, "\n! %s had %d errors, such as: %s\n", con, n, example)
		}
	}
	if !failed && len(r.incomplete) == 0 {
		b.WriteString("\nNo contender had errors.\n")
	}
}

// table returns the rows of a metric, with its header.
func (r *report) table(m metric) [][]string {
	rows := make([][]string, 0, 1+len(r.cells))
	header := make([]string, 0, 1+len(r.contenders))
	header = append(header, "")
	for _, con := range r.contenders {
		if r.over[con] {
			con += " (ended)"
		}
		header = append(header, con)
	}
	rows = append(rows, header)
	for _, c := range r.cells {
		row := make([]string, 0, 1+len(r.contenders))
		row = append(row, c)
		for _, con := range r.contenders {
			row = append(row, r.entry(con, c, m.get))
		}
		rows = append(rows, row)
	}
	return rows
}

func writeMarkdown(b *strings.Builder, rows [][]string) {
	for i, row := range rows {
		b.WriteString("| " + strings.Join(row, " | ") + " |\n")
		if i == 0 {
			b.WriteString("|" + strings.Repeat("---|", len(row)) + "\n")
		}
	}
}

func writeColumns(b *strings.Builder, rows [][]string) {
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			line.WriteString(cell + strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell)+2))
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
}
