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

// TestShowsWhatItIsFor plays all workloads, much shortened. It compares the hits of two contenders
// with those of two: which caches die with an engine is chance.
func TestShowsWhatItIsFor(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	o := &options{seed: 1, seeds: 1, speed: 20}
	list := slices.Clone(shapes)
	for i := range list {
		list[i].sessions, list[i].window = list[i].sessions/3, window/2
		// At this speed, a second engine could die while it answers what the first one lost.
		list[i].deaths = min(1, list[i].deaths)
	}
	r, err := o.play(t.Context(), list, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for _, cells := range r.cells {
		for _, c := range cells {
			checkCell(t, c)
		}
		plain, kv := cells[0].hits.Median+cells[1].hits.Median, cells[3].hits.Median+cells[4].hits.Median
		if kv < leastGain*plain {
			t.Errorf("%s: mean hit ratio %.0f %%, want %g times that of %s and %s, which is %.0f %%",
				cells[0].runs[0].load.title, kv/2, leastGain, cells[0].name, cells[1].name, plain/2)
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
	if len(lines) > 40 { // a screen
		t.Errorf("%d lines", len(lines))
	}
	for _, line := range lines {
		if len(line) > 84 {
			t.Errorf("%d bytes in line %q", len(line), line)
		}
	}
}

// checkCell checks that all was answered, and that nothing failed without a reason.
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
	for range 1000 { // the ports begin again
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

// TestSeveralRouters plays a few sessions: routers that share are as good as one.
func TestSeveralRouters(t *testing.T) {
	if testing.Short() {
		t.Skip("starts 17 processes")
	}
	s := shapes[1]
	s.sessions, s.shared, s.window = 24, 6, 60*time.Second
	var out bytes.Buffer
	if err := (&options{seed: 1, seeds: 1, speed: 12}).playRouters(t.Context(), []shape{s}, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	hits := make(map[string]float64)
	for _, g := range groups {
		_, row, _ := strings.Cut(out.String(), "\n  "+g.name+" ")
		var h float64
		if _, err := fmt.Sscan(row, &h); err != nil {
			t.Errorf("%s: %v", g.name, err)
		}
		hits[g.name] = h
	}
	one := hits["1 router"]
	if one-hits["2 routers, share"] > 3 || one-hits["4 routers, share"] > 3 || one-hits["4 routers alone"] < 5 {
		t.Errorf("hit ratios %v", hits)
	}
}
