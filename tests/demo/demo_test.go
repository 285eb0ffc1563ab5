package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

// short is the demo's workload, with less of everything. It begins at once and is
// light, so that it is done in seconds under the race detector.
func short() shape {
	s := chats
	s.window, s.rate = 18*time.Second, 2
	s.system, s.document, s.turns = 500, span{2000, 5000}, span{3, 4}
	s.think, s.thinkLeast = 4*time.Second, time.Second
	return s
}

// TestDemoShowsWhatItIsFor makes all three runs, much shortened.
func TestDemoShowsWhatItIsFor(t *testing.T) {
	if testing.Short() {
		t.Skip("takes ten seconds")
	}
	w := newWorkload(short(), 1)
	var results []*result
	for _, c := range contenders {
		r, err := play(t.Context(), c, w, defaultSpeed, newTicker(io.Discard, c.name, w.turns()))
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		results = append(results, r)
		if r.failed > 0 || r.broken > 0 && !c.deadly {
			t.Errorf("%s: %d requests failed, %d streams broke", c.name, r.failed, r.broken)
		}
		if len(r.samples) != w.turns() {
			t.Errorf("%s: %d of %d turns were answered", c.name, len(r.samples), w.turns())
		}
	}
	checkSame(t, results[0].samples, results[1].samples)
	if plain, ours := results[0].figures.hits, results[1].figures.hits; ours <= plain {
		t.Errorf("hit ratio %.2f, that of %s is %.2f", ours, results[0].name, plain)
	}
	if died, lived := results[2].died, results[2].lived; died < w.window/3 || lived < died+w.window/4 {
		t.Errorf("an engine died at %v and came back at %v, in a window of %v", died, lived, w.window)
	}
	var table, picture bytes.Buffer
	report(&table, results)
	t.Logf("\n%s", table.String())
	if err := draw(&picture, results); err != nil {
		t.Fatal(err)
	}
	checkSVG(t, picture.String(), 6)
}

// checkSame checks that two runs were asked the same.
func checkSame(t *testing.T, a, b []sample) {
	t.Helper()
	tokens := func(list []sample) (sum int64) {
		for _, s := range list {
			sum += s.prompt
		}
		return sum
	}
	if x, y := tokens(a), tokens(b); x != y {
		t.Errorf("the prompts of one run have %d tokens, those of the other %d", x, y)
	}
}

// checkSVG checks that a picture is well-formed, and has so many lines with what
// belongs to them.
func checkSVG(t *testing.T, svg string, lines int) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(svg))
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("not well-formed: %v", err)
		}
	}
	if n := strings.Count(svg, `class="line `); n != lines {
		t.Errorf("%d lines and their legends, want %d", n, lines)
	}
	if strings.Contains(svg, "NaN") || strings.Contains(svg, "Inf") {
		t.Error("a coordinate is not a number")
	}
}

// TestPictureOfLittle draws runs with hardly a sample.
func TestPictureOfLittle(t *testing.T) {
	for _, samples := range [][]sample{nil, {{}}, {{at: time.Second, ttft: time.Second}}} {
		r := &result{contender: contender{name: "<&>"}}
		r.samples = samples
		var picture bytes.Buffer
		if err := draw(&picture, []*result{r}); err != nil {
			t.Fatal(err)
		}
		checkSVG(t, picture.String(), 2)
	}
}

func TestWorkloadFollowsFromItsSeed(t *testing.T) {
	text := func(seed uint64) string {
		var b strings.Builder
		w := newWorkload(short(), seed)
		b.WriteString(w.system)
		for _, c := range w.conversations {
			b.WriteString(c.begins.String())
			for _, turn := range c.turns {
				b.WriteString(turn.think.String() + turn.question)
			}
		}
		return b.String()
	}
	if text(1) != text(1) {
		t.Error("one seed gave two workloads")
	}
	if text(1) == text(2) {
		t.Error("two seeds gave one workload")
	}
}

func TestFiguresOfARun(t *testing.T) {
	var samples []sample
	for i := range 200 {
		samples = append(samples, sample{ttft: time.Duration(i+1) * time.Second, total: 300 * time.Second, prompt: 100, cached: 25})
	}
	want := figures{hits: 0.25, mean: 100500 * time.Millisecond, median: 100 * time.Second, worst: 198 * time.Second, total: 300 * time.Second}
	if got := summarize(samples); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := summarize(nil); got != (figures{}) {
		t.Errorf("of nothing: %+v", got)
	}
}
