package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/stats"
)

// leastGain is how many times the hit ratio of round_robin and least_conn that of kv_router is at
// least.
const leastGain = 1.3

// TestShowsWhatItIsFor plays all workloads, much shortened. Most have one request at a time, so that hits do not
// depend on how busy the machine is.
func TestShowsWhatItIsFor(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	o := &options{seed: 1, seeds: 1, speed: 20, full: true}
	list := slices.Clone(shapes)
	for i := range list {
		list[i].sessions, list[i].window = list[i].sessions/3, min(list[i].window, window/2)
		// At this speed, a second engine could die while it answers what the first one lost.
		list[i].deaths = min(1, list[i].deaths)
		list[i].inTurn = list[i].deaths == 0 && !list[i].alone
	}
	r, err := o.play(t.Context(), list, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for _, cells := range r.cells {
		for _, c := range cells {
			checkCell(t, c)
		}
		plain, kv := (cells[0].hits.Median+cells[1].hits.Median)/2, min(cells[3].hits.Median, cells[4].hits.Median)
		if w := cells[0].runs[0].load; w.inTurn && kv < leastGain*plain {
			t.Errorf("%s: hit ratio %.0f %%, want %g times that of %s and %s, which is %.0f %%", w.title, kv, leastGain, cells[0].name, cells[1].name, plain)
		}
	}
	var text strings.Builder
	r.write(&text)
	t.Logf("\n%s", text.String())
	var picture strings.Builder
	if err := r.draw(&picture); err != nil {
		t.Fatal(err)
	}
	if bars := strings.Count(picture.String(), `class="range"`); bars != len(r.cells)*len(r.cells[0]) {
		t.Errorf("the picture has %d bars", bars)
	}
	if err := xml.Unmarshal([]byte(picture.String()), new(struct{})); err != nil {
		t.Errorf("the picture is not well-formed: %v", err)
	}
	lines := strings.Split(strings.TrimSpace(text.String()), "\n")
	if len(lines) > 54 { // a high screen
		t.Errorf("%d lines", len(lines))
	}
	for _, line := range lines {
		if len(line) > 84 {
			t.Errorf("%d bytes in line %q", len(line), line)
		}
	}
}

// checkCell checks that all was answered, and that no request failed without a reason.
func checkCell(t *testing.T, c *cell) {
	t.Helper()
	w := c.runs[0].load
	failed, broken, saved, of := c.casualties()
	switch {
	case w.deaths == 0 && (c.answered != c.asked || failed+broken > 0):
		t.Errorf("%s, %s: %d of %d turns answered, %d requests failed, %d broke", w.title, c.name, c.answered, c.asked, failed, broken)
	case strings.HasPrefix(c.name, "kv_router") && (failed > 0 || saved != of):
		t.Errorf("%s, %s: %d requests failed, %d of %d were saved", w.title, c.name, failed, saved, of)
	}
}

func TestWorkloadFollowsFromItsSeed(t *testing.T) {
	text := func(s shape, seed uint64) string {
		var b strings.Builder
		w := newWorkload(s, seed)
		b.WriteString(w.prompt)
		for _, c := range w.sessions {
			b.WriteString(c.begins.String() + c.document)
			for _, turn := range c.turns {
				b.WriteString(turn.think.String() + turn.question)
			}
		}
		return b.String()
	}
	for _, s := range shapes {
		if text(s, 1) != text(s, 1) {
			t.Errorf("%s: one seed gave two workloads", s.title)
		}
		if text(s, 1) == text(s, 2) {
			t.Errorf("%s: two seeds gave one workload", s.title)
		}
	}
}

func TestTiesAndLossesAreNamed(t *testing.T) {
	for _, c := range []struct {
		ratios []float64
		want   string
	}{
		{[]float64{1.8, 2, 3}, "2.00x"},
		{[]float64{0.99, 2, 3}, "2.00x unclear"},
		{[]float64{1.01, 1.04, 2}, "1.04x tie"},
		{[]float64{0.5, 0.8, 0.9}, "0.80x LOST"},
		{[]float64{0.5, 0.8, 1.1}, "0.80x unclear"},
		{nil, ""},
		{[]float64{0, 0, 0}, ""},
	} {
		x := cell{against: stats.Of(c.ratios)}
		if got := x.verdict(); got != c.want {
			t.Errorf("%v: got %q, want %q", c.ratios, got, c.want)
		}
	}
}

// TestGivenEngines plays one short workload twice before the same two engines. A run
// that found what an earlier one left in the caches would have more hits.
func TestGivenEngines(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	o := &options{seed: 1, seeds: 2, speed: 50, model: "other"}
	for range 2 {
		e, err := engine.Start(engine.Config{Model: o.model, Speed: o.speed})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		o.given = append(o.given, e.Addr())
	}
	list := slices.Clone(shapes[:1])
	list[0].window /= 4
	for range 2 {
		var out strings.Builder
		cells, err := o.playGiven(t.Context(), list, &out, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("\n%s", out.String())
		if len(cells) != 2 || strings.Count(out.String(), "\n") != 5 {
			t.Fatalf("%d contenders in\n%s", len(cells), out.String())
		}
		for _, c := range cells {
			checkCell(t, c)
			if c.hits.Most > 90 {
				t.Errorf("%s: hit ratio %.0f %%, as if an earlier run had filled the caches", c.name, c.hits.Most)
			}
		}
	}
	o.model = "unknown"
	if _, err := o.playGiven(t.Context(), list, io.Discard, io.Discard); err == nil {
		t.Error("no error although the engines serve another model")
	}
}

// TestAddressesArePromisedOnce asks for so many addresses that the ports of the process begin again.
func TestAddressesArePromisedOnce(t *testing.T) {
	promised := make(map[string]bool)
	for n := 1; n <= 700; n++ {
		if addr, err := freeAddr(promised); err != nil || len(promised) != n {
			t.Fatalf("address %d is %s, error %v", n, addr, err)
		}
	}
	for range 30_000 { // the ports begin again, even if the process has no share of its own
		if addr, err := canned.FreeAddr(); err != nil {
			t.Fatal(err)
		} else if promised[addr] {
			if again, err := freeAddr(promised); err != nil || len(promised) != 701 {
				t.Fatalf("%s after %s, error %v", again, addr, err)
			}
			return
		}
	}
	t.Error("the ports did not begin again: the test shows nothing")
}

func TestMain(m *testing.M) {
	if file := os.Getenv(childConfig); file != "" {
		fmt.Println(cluster.Serve(file))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// TestSeveralRouters plays a few sessions, one request at a time. Routers that share, or have events, have nearly the
// hits of one router. What routers that share nothing have is a matter of luck: they may choose alike.
func TestSeveralRouters(t *testing.T) {
	if testing.Short() {
		t.Skip("starts 17 processes")
	}
	s := shapes[1]
	s.sessions, s.shared, s.inTurn, s.window = 17, 4, true, 30*time.Second
	var out bytes.Buffer
	if err := (&options{seed: 1, seeds: 1, speed: 12}).playRouters(t.Context(), []shape{s}, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	t.Log(out.String())
	var one float64
	for i, g := range groups {
		_, row, _ := strings.Cut(out.String(), "\n  "+g.name+" ")
		var hits float64
		if _, err := fmt.Sscan(row, &hits); err != nil {
			t.Errorf("%s: %v", g.name, err)
		}
		if i == 0 {
			one = hits
		}
		if (g.share || g.events) && hits < 0.9*one {
			t.Errorf("%s: hit ratio %.1f %%, that of one router is %.1f %%", g.name, hits, one)
		}
	}
}

// TestQuestionsThatStandAlone checks that all clients begin at once and that no question repeats an
// earlier one. Answers are counted over the time that all of them took.
func TestQuestionsThatStandAlone(t *testing.T) {
	i := slices.IndexFunc(shapes, func(s shape) bool { return s.alone })
	s := shapes[i]
	s.sessions, s.system, s.answer = 2, 64, span{8, 8}
	r := &run{contender: contenders[0], load: newWorkload(s, 1), model: model}
	a, err := newArena(r)
	if err != nil {
		t.Fatal(err)
	}
	defer a.stop()
	if err := a.start(t.Context(), 50); err != nil {
		t.Fatal(err)
	}
	a.play(t.Context(), 50)
	longest := s.system + s.question.most + 100 // the template's tokens, too
	end := time.Duration(0)
	for _, x := range r.samples {
		if end = max(end, x.end); x.prompt > longest {
			t.Errorf("a prompt of %d tokens, want at most %d", x.prompt, longest)
		}
	}
	want := float64(r.load.requests()) / end.Minutes()
	if got := summarize(r.samples).rate; len(r.samples) != r.load.requests() || got != want {
		t.Errorf("%d samples, %g answers in a minute, want %d and %g", len(r.samples), got, r.load.requests(), want)
	}
	for _, c := range r.load.sessions {
		if c.begins != 0 {
			t.Errorf("session %d begins after %v", c.id, c.begins)
		}
	}
}

// TestOneEngineIsSlow compares the time that the slow engine takes for a prompt with that of another.
func TestOneEngineIsSlow(t *testing.T) {
	c, err := cluster.New()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Stop()
	w := newWorkload(shape{slow: true, sessions: 1, system: 4000, turns: span{1, 1}, answer: span{1, 1}}, 1)
	const speed = 10
	_, addrs, err := startEngines(c, w, speed, false)
	if err != nil {
		t.Fatal(err)
	}
	var took []time.Duration
	for _, addr := range addrs[:2] {
		r := &run{load: w, model: model, addrs: []string{addr}}
		(&arena{Cluster: c, runs: []*run{r}}).play(t.Context(), speed)
		if len(r.samples) != 1 {
			t.Fatalf("%d answers", len(r.samples))
		}
		took = append(took, r.samples[0].ttft)
	}
	if took[0] < slowdown*took[1]*2/3 {
		t.Errorf("the slow engine took %v, another %v", took[0], took[1])
	}
}
