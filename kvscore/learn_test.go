package kvscore

import (
	"math"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// samples returns how many timings the pool has learned from.
func samples(s *Scheduler) uint64 { return s.Stats().Timings }

// lastTiming returns the features and the time of the timing that l ends, and ends it.
func lastTiming(t *testing.T, s *Scheduler, l *Lease, computed bool) (x features, ms float64, learned bool) {
	t.Helper()
	m, before := l.timing, samples(s)
	l.End(computed, nil)
	if m == nil {
		return x, 0, samples(s) > before
	}
	return m.x, m.ms, samples(s) > before
}

func TestPrefillsThatFollowEachOtherShareATiming(t *testing.T) {
	s, ts := declared(1)
	var live []*Lease
	for _, tokens := range []int64{1000, 2000, 3000} {
		live = append(live, book(s, ts, tokens, epoch))
	}
	for i, at := range []float64{50, 150, 300} {
		live[i].FirstToken(after(at))
	}
	for i, l := range live {
		x, ms, learned := lastTiming(t, s, l, true)
		want := workOf(1000, 0)
		want.add(workOf(2000, 0))
		want.add(workOf(3000, 0))
		if last := i == 2; learned != last {
			t.Errorf("lease %d: learned %v", i, learned)
		} else if last && (ms != 300 || x.fixed != 1 || !near(x.tokens, want.tokens, 1e-9) || !near(x.pairs, want.pairs, 1e-9)) {
			t.Errorf("%v in %v ms, want %+v in 300", x, ms, want)
		}
	}
	idle(t, s, ts, epoch)
}

// TestLateFirstTokensAreNoTimings has the first token of a long prefill come after that of the short one
// behind it, as from another router. The long one was over by then.
func TestLateFirstTokensAreNoTimings(t *testing.T) {
	for name, over := range map[string]bool{"the answer goes on": false, "the answer is over": true} {
		s, ts := declared(1)
		long, short := book(s, ts, 19000, epoch), book(s, ts, 200, epoch)
		short.FirstToken(after(500))
		if over {
			short.End(true, nil)
		}
		long.FirstToken(after(510))
		x, ms, learned := lastTiming(t, s, long, true)
		short.End(true, nil)
		want := workOf(19000, 0)
		want.add(workOf(200, 0))
		if over && learned {
			t.Errorf("%s: %v in %v ms", name, x, ms)
		}
		if !over && (ms != 510 || !near(x.tokens, want.tokens, 1e-9)) {
			t.Errorf("%s: %v in %v ms, want %+v in 510", name, x, ms, want)
		}
		if samples(s) != 1 {
			t.Errorf("%s: %d timings are learned", name, samples(s))
		}
		idle(t, s, ts, epoch)
	}
}

func TestFailedLeaseSpoilsItsTiming(t *testing.T) {
	for failed := range 3 {
		s, ts := declared(1)
		var live []*Lease
		for range 3 {
			live = append(live, book(s, ts, 1000, epoch))
		}
		for i, l := range live {
			l.FirstToken(after(100 * float64(i+1)))
		}
		for i, l := range live {
			l.End(i != failed, nil)
		}
		if samples(s) != 0 {
			t.Errorf("%d timings are learned though lease %d failed", samples(s), failed)
		}
		next := book(s, ts, 1000, after(1000))
		next.FirstToken(after(1100))
		next.End(true, nil)
		if samples(s) != 1 {
			t.Errorf("%d timings are learned after that", samples(s))
		}
		idle(t, s, ts, epoch)
	}
}

func TestCountsCorrectATiming(t *testing.T) {
	for name, tc := range map[string]struct {
		counts Counts
		want   work
	}{
		"none":             {Counts{}, workOf(1000, 0)},
		"a longer prompt":  {Counts{Prompt: 1500, CachedReported: true}, workOf(1500, 0)},
		"a cached part":    {Counts{Prompt: 1000, Cached: 800, CachedReported: true}, workOf(200, 800)},
		"not how many are": {Counts{Prompt: 1500, Cached: 800}, workOf(1000, 0)},
	} {
		s, ts := declared(1)
		a, b := book(s, ts, 1000, epoch), book(s, ts, 3000, epoch)
		a.FirstToken(after(40))
		b.FirstToken(after(150))
		a.Counted(tc.counts)
		a.End(true, nil)
		x, ms, learned := lastTiming(t, s, b, true)
		want := tc.want
		want.add(workOf(3000, 0))
		if !learned || ms != 150 || !near(x.tokens, want.tokens, 1e-9) || !near(x.pairs, want.pairs, 1e-9) {
			t.Errorf("%s: learned %v: %v in %v ms, want %+v in 150", name, learned, x, ms, want)
		}
		idle(t, s, ts, epoch)
	}
}

// TestTimingNeedsAKnownBeginning has leases end without a first token, and others
// follow them: since when the engine has worked on these is unknown.
func TestTimingNeedsAKnownBeginning(t *testing.T) {
	for name, tc := range map[string]struct {
		gone int // of three
		want uint64
	}{
		"the first":  {0, 1}, // b's beginning is unknown, c's is not
		"the second": {1, 1}, // a and c share one: it is unknown whether b was computed
		"the last":   {2, 1}, // a and b
	} {
		s, ts := declared(1)
		var live []*Lease
		for range 3 {
			live = append(live, book(s, ts, 1000, epoch))
		}
		live[tc.gone].End(false, nil)
		waits(s, ts, after(50)) // reading the load makes it no better known
		for i, l := range live {
			l.FirstToken(after(100 * float64(i+1)))
		}
		for _, l := range live {
			l.End(true, nil)
		}
		if samples(s) != tc.want {
			t.Errorf("%s: %d timings are learned, want %d", name, samples(s), tc.want)
		}
		idle(t, s, ts, epoch)
	}
}

// TestSlowTargetIsTold has one target of four that takes twice as long.
func TestSlowTargetIsTold(t *testing.T) {
	s, ts := declared(4)
	at := epoch
	for i := range 400 {
		_, l := s.selectOf(at, &Request{Prompt: cache.Prompt{Tokens: 4000}, Streamed: true}, ts, i%4, nil, &Selection{Rand: seeded(1)})
		ms := 200.
		if i%4 == 2 {
			ms = 400
		}
		at = at.Add(time.Duration(ms * float64(time.Millisecond)))
		l.FirstToken(at)
		l.End(true, nil)
	}
	fast, _ := s.Load(at, ts[0])
	slow, _ := s.Load(at, ts[2])
	if r := slow.Slowness / fast.Slowness; !near(r, 2, 0.15) {
		t.Errorf("it takes %.2f times as long as another, want 2: %.2f, %.2f", r, slow.Slowness, fast.Slowness)
	}
	if slow.Timings != 100 || slow.Predictions != 64 || slow.ErrorMedian > 0.2 {
		t.Errorf("%+v", slow)
	}
}

func after(ms float64) time.Time { return epoch.Add(time.Duration(ms * float64(time.Millisecond))) }

// book books a prompt on the first target, of which no target holds anything.
func book(s *Scheduler, ts []Target, tokens int64, at time.Time) *Lease {
	_, l := s.selectOf(at, &Request{Prompt: cache.Prompt{Tokens: tokens}, Streamed: true}, ts[:1], 0, nil, &Selection{Rand: seeded(1)})
	return l
}

// alone returns the predicted time for a prompt of the given tokens, without the fixed
// part.
func alone(s *Scheduler, tokens int64) float64 {
	return s.latency.predict(featuresOf(0, workOf(tokens, 0), 0))
}

// waits returns the wait on the first target.
func waits(s *Scheduler, ts []Target, at time.Time) float64 {
	sel := &Selection{Rand: seeded(1)}
	s.explainOf(at, &Request{Prompt: cache.Prompt{Tokens: 16}}, ts, 0, new(LeastLoad), sel)
	return sel.Candidates[0].WaitTime
}

func TestWaitAges(t *testing.T) {
	s, ts := declared(1)
	first, second := alone(s, 10_000), alone(s, 2000)
	fixed := s.latency.predict(featuresOf(1, work{}, 0))
	a := book(s, ts, 10_000, epoch)
	b := book(s, ts, 2000, after(10))
	for _, c := range []struct {
		name     string
		at, want float64
	}{
		{"nothing has run", 0, first + second},
		{"the first one has run", 100, first - 100 + second},
		{"it should be over", first, second},
		{"it may take a step longer", first + fixed, second},
		{"it is overdue, and expected to be as late again", first + fixed + 70, second + 70},
		{"it is far overdue", 1e7, second + 1e7 - first - fixed},
	} {
		if got := waits(s, ts, after(c.at)); math.Abs(got-c.want) > 0.01 {
			t.Errorf("%s: wait %.2f ms, want %.2f", c.name, got, c.want)
		}
	}
	a.FirstToken(after(500)) // overdue no more: the second one begins
	for at, want := range map[float64]float64{500: second, 520: second - 20, 500 + second + fixed + 30: 30} {
		// The first one generates now: each step reads its context.
		if got := waits(s, ts, after(at)); math.Abs(got-want) > 1 {
			t.Errorf("after the first token, at %.1f ms: wait %.2f ms, want %.2f", at, got, want)
		}
	}
	b.FirstToken(after(600))
	if got := waits(s, ts, after(700)); got != 0 {
		t.Errorf("wait %.2f ms though all prefills are over", got)
	}
	a.End(true, nil)
	b.End(true, nil)
	idle(t, s, ts, after(700))
}
