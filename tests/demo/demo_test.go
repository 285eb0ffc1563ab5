package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// short is the demo's workload, with less of everything. It begins at once and is
// light, so that it is done in seconds under the race detector.
func short() shape {
	s := chats
	s.window, s.rate = 18*time.Second, 2
	s.system, s.document, s.turns = 200, span{2000, 5000}, span{3, 4}
	s.shared = 0 // what conversations share is found anywhere
	s.think, s.thinkLeast = 4*time.Second, time.Second
	return s
}

// tiny is what only has to be done soon.
func tiny(svg string) *options {
	return &options{svg: svg, duration: time.Second, scale: 1, seed: 1, speed: 100}
}

// margin is how many times round_robin's hit ratio kv_router's is at least. Two
// runs that do not look at the caches differ by a few percent.
const margin = 1.5

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
	if plain, ours := results[0].figures.hits, results[1].figures.hits; ours < margin*plain {
		t.Errorf("hit ratio %.2f, want %g times that of %s, which is %.2f", ours, margin, results[0].name, plain)
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
			for i, turn := range c.turns {
				b.WriteString(turn.think.String() + c.question(i))
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

// TestDocumentsAreShared checks that an eighth of the documents has more than one
// conversation, and that more conversations do not change those there are.
func TestDocumentsAreShared(t *testing.T) {
	s := short()
	s.document, s.rate, s.shared = span{3, 20}, 100, chats.shared
	w := newWorkload(s, 1)
	readers := make(map[string]int)
	about := 0
	for _, c := range w.conversations {
		if c.document != "" {
			readers[c.document]++
			about++
		}
	}
	shared := 0
	for _, n := range readers {
		if n > 1 {
			shared++
		}
	}
	if share := float64(shared) / float64(len(readers)); share < 0.08 || share > 0.18 {
		t.Errorf("%d of %d documents are shared", shared, len(readers))
	}
	if share := float64(about) / float64(len(w.conversations)); share < 0.6 || share > 0.7 {
		t.Errorf("%d of %d conversations are about a document", about, len(w.conversations))
	}
	s.rate *= 2
	for i, c := range newWorkload(s, 1).conversations[:len(w.conversations)] {
		if want := w.conversations[i]; c.question(0) != want.question(0) || len(c.turns) != len(want.turns) {
			t.Fatalf("conversation %d differs when there are more", i)
		}
	}
}

func TestWorkingSetCountsADocumentOnce(t *testing.T) {
	document := strings.Repeat("word", 100)
	var y tally
	y.hold(document, 0, 120)
	y.hold("", 0, 30)
	y.hold(document, 0, 150)
	y.hold(document, 120, 140)
	if y.open != 220 {
		t.Errorf("%d tokens, want 220", y.open)
	}
	y.hold(document, 150, 0)
	if y.open != 170 || y.peak != 220 {
		t.Errorf("%d tokens, at most %d, want 170 and 220", y.open, y.peak)
	}
	y.hold(document, 140, 0)
	y.hold("", 30, 0)
	if y.open != 0 || y.peak != 220 {
		t.Errorf("%d tokens, at most %d, want 0 and 220", y.open, y.peak)
	}
}

// TestTurnIsGivenUp asks a server that never answers.
func TestTurnIsGivenUp(t *testing.T) {
	var named []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		named = append(named, r.Header.Get(conversationHeader))
		http.Error(w, `{"error":{"message":"no"}}`, http.StatusServiceUnavailable)
	}))
	r := &result{contender: contender{name: "nobody"}, turns: 3}
	p := newPlayer(server.URL, "", 100, &r.tally)
	p.tells = true
	p.converse(t.Context(), &conversation{id: 7, turns: make([]turn, 3)})
	server.Close()
	if r.givenUp != 1 || r.failed != attempts || len(r.samples) != 0 {
		t.Errorf("%d turns given up, %d requests failed, %d turns answered", r.givenUp, r.failed, len(r.samples))
	}
	if want := []string{"7", "7", "7", "7"}; !slices.Equal(named, want) {
		t.Errorf("the conversation's header was %q, want %q", named, want)
	}
	var out bytes.Buffer
	report(&out, []*result{r})
	for _, want := range []string{"0 of 3", "1 turns had no whole answer in 4 attempts", "so 3 turns"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// TestMachineThatDoesNotKeepUp checks that all runs are measured alike: one with
// long times may be no later than one with short ones.
func TestMachineThatDoesNotKeepUp(t *testing.T) {
	for _, mean := range []time.Duration{time.Second, time.Minute} {
		for _, c := range []struct {
			overhead, lag time.Duration
			warns         bool
		}{
			{mostOverhead, mostLag, false},
			{mostOverhead + 1, 0, true},
			{0, mostLag + 1, true},
		} {
			r := &result{figures: figures{mean: mean, worst: mean}, overhead: c.overhead, lag: c.lag}
			var out bytes.Buffer
			report(&out, []*result{r})
			if warned := strings.Contains(out.String(), "WARNING"); warned != c.warns {
				t.Errorf("mean TTFT %v, overhead %v, lag %v: warned is %t", mean, c.overhead, c.lag, warned)
			}
			if !strings.Contains(out.String(), seconds(c.lag)) {
				t.Errorf("no lag in\n%s", out.String())
			}
		}
	}
}

// TestPictureThatFails checks that the table does not need the picture.
func TestPictureThatFails(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	var out, notes bytes.Buffer
	err := compare(t.Context(), &out, &notes, tiny(filepath.Join(t.TempDir(), "none", "x.svg")))
	if err == nil || !strings.Contains(notes.String(), "no picture") {
		t.Errorf("error %v, and the note:\n%s", err, notes.String())
	}
	if !strings.Contains(out.String(), "turns answered") {
		t.Errorf("no table:\n%s", out.String())
	}
}

func TestCommandLine(t *testing.T) {
	o, err := parse([]string{"-also", "sticky, least_conn,sticky"})
	if err != nil {
		t.Fatal(err)
	}
	if len(o.also) != 2 || o.also[0].name != "sticky" || o.also[1].name != "least_conn" {
		t.Errorf("more runs are %v", o.also)
	}
	for _, args := range [][]string{{"-also", "luck"}, {"-speed", "101"}, {"-scale", "0"}, {"more"}} {
		if _, err := parse(args); err == nil {
			t.Errorf("%q is accepted", args)
		}
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
