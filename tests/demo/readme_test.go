package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/stats"
)

// TestReadmeShowsTheDemosTable compares the form of the README's table with what the demo writes: title,
// columns, and the forms of their figures. The figures are those of one run.
func TestReadmeShowsTheDemosTable(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(readme), "```text\n$ go run ./tests/demo\n\n")
	block, _, _ = strings.Cut(block, "```")
	shown := strings.Split(strings.TrimRight(block, "\n"), "\n")
	title, _, _ := strings.Cut(shown[0], "  ")
	of := []*run{{load: &workload{shape: shape{title: title}}}}
	var b strings.Builder
	head(&b, of[0].load)
	for _, line := range shown[1:] {
		name := strings.TrimSpace(line[:min(len(line), 2+nameWidth)])
		c := &cell{contender: contender{name: name}, runs: of}
		c.hits, c.mean, c.p99 = stats.Of([]float64{80, 90}), stats.Of([]float64{1, 2}), stats.Of([]float64{2, 3})
		if !strings.HasPrefix(name, "kv_router") {
			c.against = stats.Of([]float64{1, 2})
		}
		c.row(&b)
	}
	form := func(line string) string {
		line = regexp.MustCompile(` (?:LOST|tie|unclear)$`).ReplaceAllString(line, "")
		line = regexp.MustCompile(`\d+(?:\.\d+)?`).ReplaceAllString(line, "0")
		return strings.Join(strings.Fields(line), " ")
	}
	written := strings.Split(strings.Trim(b.String(), "\n"), "\n")
	for i, line := range shown {
		if i >= len(written) || form(line) != form(written[i]) {
			t.Errorf("line %d of the README's table is %q, the demo writes\n%s", i+1, line, b.String())
		}
	}
}
