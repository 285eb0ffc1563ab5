package handler

import (
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// flowTest is a pool of two workers, a and b, at a time of its own.
type flowTest struct {
	p    *pool
	a, b *worker
	now  time.Time
}

func newFlowTest(t *testing.T) *flowTest {
	t.Helper()
	// without the upkeep, which has a clock of its own
	p := &pool{name: "test", scheduler: kvscore.NewScheduler(kvscore.Settings{}), workers: make(map[string]*worker)}
	p.settings.Store(wanted().withDefaults())
	p.queue.pool = p
	return &flowTest{p, p.worker("a:1"), p.worker("b:1"), epoch}
}

// booked is an attempt with its booking.
type booked struct {
	stream
	lease  *kvscore.Lease
	caused atomic.Bool // it was canceled to move
}

// begin books an attempt on the worker.
func (f *flowTest) begin(w *worker, kind work, ahead int64) *booked {
	var sel kvscore.Selection
	sel.Rand = random{}
	_, lease := f.p.scheduler.Select(f.now, &kvscore.Request{Tokens: ahead, Streamed: true}, []kvscore.Target{w.target(0)}, -1, &kvscore.LeastLoad{}, &sel)
	a := &booked{stream: stream{worker: w, target: w.target(0), begun: f.now, work: kind, ahead: ahead}, lease: lease}
	w.flow.begin(&a.stream)
	return a
}

// showsRate has a worker show that it is as fast as is reckoned with.
func (f *flowTest) showsRate(w *worker) {
	a := f.begin(w, workStream, 512)
	a.lease.FirstToken(f.now.Add(time.Duration(512 / leastRate * float64(time.Second))))
	a.lease.End(true, nil)
	w.flow.end(&a.stream)
}

// moved returns which of the attempts were canceled to move, and checks how many.
func (f *flowTest) moved(t *testing.T, all []*booked, want int) (moved []bool) {
	t.Helper()
	n := 0
	for _, a := range all {
		if moved = append(moved, a.caused.Load()); a.caused.Load() {
			n++
		}
	}
	if n != want {
		t.Errorf("%d were moved, want %d", n, want)
	}
	return moved
}

// allow lets an attempt move to another worker than a.
func (f *flowTest) allow(a *booked) {
	ups := reverseproxy.UpstreamPool{{Dial: f.a.dial}, {Dial: f.b.dial}}
	tab, _ := f.p.newTable(ups, nil, false)
	want := Wants{Rank: anyRank, Slot: true, Tried: []*worker{f.a}}
	a.worker.flow.allow(&a.stream, &move{func() { a.caused.Store(true) }, want, offers{ups, tab}})
}

// pass lets time pass in which something comes from the workers given, and
// returns after how long the first one was found to hang, 0 if none was.
func (f *flowTest) pass(d time.Duration, from ...*worker) time.Duration {
	for i := range int(d / hungCheck) {
		f.now = f.now.Add(hungCheck)
		for _, w := range from {
			w.flow.last.Store(ticks(f.now))
		}
		f.p.findHung(f.now)
		if f.a.flow.hangs() || f.b.flow.hangs() {
			return time.Duration(i+1) * hungCheck
		}
	}
	return 0
}

// TestWorkerHangs is silent on a stream for longer and longer.
func TestWorkerHangs(t *testing.T) {
	soon := hungAfter + (hungChecks-1)*hungCheck
	for _, v := range []struct {
		name string
		set  func(f *flowTest) (others []*worker)
		want time.Duration // 0 is never
	}{
		{"a stream", func(f *flowTest) []*worker {
			f.begin(f.a, workStream, 10)
			return []*worker{f.b}
		}, soon},
		{"many streams", func(f *flowTest) []*worker {
			for range 32 {
				f.begin(f.a, workStream, 10)
			}
			return []*worker{f.b}
		}, soon},
		{"nothing is asked of it", func(f *flowTest) []*worker { return []*worker{f.b} }, 0},
		{"its stream has ended", func(f *flowTest) []*worker {
			x, y := f.begin(f.a, workStream, 10), f.begin(f.a, workStream, 10)
			f.a.flow.end(&x.stream)
			f.a.flow.end(&y.stream)
			return []*worker{f.b}
		}, 0},
		{"nobody makes progress", func(f *flowTest) []*worker {
			f.begin(f.a, workStream, 10)
			f.begin(f.b, workStream, 10)
			return nil
		}, 0},
		{"it makes progress", func(f *flowTest) []*worker {
			f.begin(f.a, workStream, 10)
			return []*worker{f.a, f.b}
		}, 0},
		{"not streamed", func(f *flowTest) []*worker {
			f.begin(f.a, workSilent, 10)
			return []*worker{f.b}
		}, quietUnknown + (hungChecks-1)*hungCheck},
		{"not streamed, and answers are known to be short", func(f *flowTest) []*worker {
			f.b.flow.longest = time.Second
			f.begin(f.a, workSilent, 10)
			return []*worker{f.b}
		}, quietAfter + (hungChecks-1)*hungCheck},
		{"not streamed, and answers are known to take long", func(f *flowTest) []*worker {
			f.a.flow.longest = time.Minute
			f.begin(f.a, workSilent, 10)
			return []*worker{f.b}
		}, quietAnswers*time.Minute + (hungChecks-1)*hungCheck},
		{"not streamed, and nobody makes progress", func(f *flowTest) []*worker {
			f.begin(f.a, workSilent, 10)
			f.begin(f.b, workSilent, 10)
			return nil
		}, 0},
		{"no inference", func(f *flowTest) []*worker {
			f.begin(f.a, workNone, 10)
			return []*worker{f.b}
		}, 0},
		{"it has an answer to make that is silent", func(f *flowTest) []*worker {
			f.begin(f.a, workSilent, 10)
			f.begin(f.a, workStream, 10)
			return []*worker{f.b}
		}, hungSilent*hungAfter + (hungChecks-1)*hungCheck},
		{"the client does not read", func(f *flowTest) []*worker {
			f.begin(f.a, workStream, 10).waiting.Store(false)
			return []*worker{f.b}
		}, 0},
		{"a long prompt", func(f *flowTest) []*worker {
			f.begin(f.a, workStream, 50*leastRate) // predicted to take 50 s
			return []*worker{f.b}
		}, hungPrefills*50*time.Second + (hungChecks-1)*hungCheck},
		{"the prompts that came later", func(f *flowTest) []*worker {
			f.begin(f.a, workStream, 10)
			f.now = f.now.Add(5 * time.Second)
			f.begin(f.a, workStream, 500*leastRate)
			return []*worker{f.b}
		}, soon - 5*time.Second},
		{"a stream that waits for a client, and a new one", func(f *flowTest) []*worker {
			f.begin(f.a, workStream, 10).waiting.Store(false)
			f.a.flow.last.Store(ticks(f.now))
			f.now = f.now.Add(time.Minute)
			f.begin(f.a, workStream, 10)
			return []*worker{f.b}
		}, soon},
	} {
		t.Run(v.name, func(t *testing.T) {
			f := newFlowTest(t)
			others := v.set(f)
			if got := f.pass(10*time.Minute, others...); got != v.want {
				t.Errorf("found to hang after %v, want %v", got, v.want)
			}
			if f.b.flow.hangs() {
				t.Error("the other one is said to hang")
			}
			if v.want > 0 && f.a.health.available(f.now) {
				t.Error("it is not marked down")
			}
		})
	}
}

// TestOthersAreAtWorkMeanwhile has all stop at the same time, and one of them
// go on a moment longer: neither is to blame.
func TestOthersAreAtWorkMeanwhile(t *testing.T) {
	f := newFlowTest(t)
	f.begin(f.a, workStream, 10)
	f.begin(f.b, workStream, 10)
	f.pass(2*time.Second, f.b)
	if got := f.pass(10 * time.Minute); got != 0 {
		t.Errorf("a worker was found to hang after %v, and the other one stopped, too", got)
	}
}

// TestOneLateByteIsEnough stands still for so long that a check sees it.
func TestOneLateByteIsEnough(t *testing.T) {
	f := newFlowTest(t)
	f.begin(f.a, workStream, 10)
	f.now = f.now.Add(time.Hour)
	for range 20 {
		f.b.flow.last.Store(ticks(f.now))
		f.p.findHung(f.now)
		f.now = f.now.Add(hungCheck)
		f.a.flow.last.Store(ticks(f.now)) // it comes a moment after the check
		if f.a.flow.hangs() {
			t.Fatal("found to hang, though something came")
		}
	}
}

// TestHungWorkerFlowsAgain lets something come.
func TestHungWorkerFlowsAgain(t *testing.T) {
	f := newFlowTest(t)
	f.begin(f.a, workStream, 10)
	if f.pass(time.Minute, f.b) == 0 {
		t.Fatal("it does not hang")
	}
	for range 60 {
		f.now = f.now.Add(hungCheck)
		f.p.findHung(f.now)
	}
	if !f.a.flow.hangs() {
		t.Fatal("it is forgotten that it hangs")
	}
	f.now = f.now.Add(hungCheck)
	f.a.flow.last.Store(ticks(f.now))
	f.p.findHung(f.now)
	if f.a.flow.hangs() || !f.a.health.available(f.now) {
		t.Errorf("hangs: %v, available: %v", f.a.flow.hangs(), f.a.health.available(f.now))
	}
}

// TestUnheadedRequestsAreMoved has requests with and without a header on a
// worker that hangs, and room elsewhere and a budget for some of them. Those that
// have no room are left alone until there is some.
func TestUnheadedRequestsAreMoved(t *testing.T) {
	for _, v := range []struct {
		name   string
		budget float64
		set    func(f *flowTest)
		want   int
		later  int // once b has a slot more
	}{
		{"all", 100, func(f *flowTest) {}, 8, 8},
		{"the budget", 4, func(f *flowTest) {}, 4, 4},
		{"some room", 100, func(f *flowTest) { f.b.slots.limit.Store(3) }, 3, 4},
		{"no room", 100, func(f *flowTest) {
			f.b.slots.limit.Store(1)
			f.b.slots.take()
		}, 0, 1},
		{"the other is marked down", 100, func(f *flowTest) { f.b.health.fail(time.Now(), time.Now(), 0, false) }, 0, 0},
		{"the other drains", 100, func(f *flowTest) { f.b.drain.Store(drainAsked) }, 0, 0},
		{"it has given no first token", 100, func(f *flowTest) {
			f.p.scheduler = kvscore.NewScheduler(kvscore.Settings{})
			f.p.scheduler.Declare(f.a.target(0), 1<<20)
			f.p.scheduler.Declare(f.b.target(0), 1<<20)
		}, 0, 0},
	} {
		t.Run(v.name, func(t *testing.T) {
			f := newFlowTest(t)
			f.showsRate(f.a)
			v.set(f)
			set := *f.p.settings.Load()
			set.retries = retryBudget{true, 0, v.budget / budgetWindow}
			f.p.settings.Store(&set)
			var all []*booked
			for i := range 16 {
				a := f.begin(f.a, workStream, 10)
				f.allow(a)
				all = append(all, a)
				if i%2 == 0 && f.a.flow.arrived(&a.stream) {
					t.Error("moved before it hangs")
				}
				a.waiting.Store(true)
			}
			if f.pass(time.Minute, f.b) == 0 {
				t.Fatal("it does not hang")
			}
			for i, m := range f.moved(t, all, v.want) {
				if m && i%2 == 0 {
					t.Error("a request was moved whose header had come")
				}
			}
			for range v.want { // the retries take their slots
				f.b.slots.take()
			}
			f.b.slots.running.Add(-1)
			f.p.findHung(f.now.Add(hungCheck))
			f.moved(t, all, v.later)
		})
	}
}

// TestFlowCountsWhatIsThere begins and ends attempts in any order.
func TestFlowCountsWhatIsThere(t *testing.T) {
	f := newFlowTest(t)
	rng := rand.New(rand.NewPCG(1, 2))
	var live []*booked
	for range 2000 {
		if len(live) > 0 && rng.IntN(2) == 0 {
			i := rng.IntN(len(live))
			f.a.flow.end(&live[i].stream)
			live[i].lease.End(false, nil)
			live[i] = live[len(live)-1]
			live = live[:len(live)-1]
		} else {
			live = append(live, f.begin(f.a, work(rng.IntN(3)), 1))
		}
		var want [3]int
		for _, a := range live {
			want[a.work]++
			if a.work == workStream && f.a.flow.streams[a.pos] != &a.stream {
				t.Fatal("an attempt is not where it says it is")
			}
		}
		if len(f.a.flow.streams) != want[workStream] || f.a.flow.silent != want[workSilent] {
			t.Fatalf("%d streams and %d silent, want %d and %d", len(f.a.flow.streams), f.a.flow.silent, want[workStream], want[workSilent])
		}
	}
}

// TestProbeIsNotLost sends a request to a hung worker that does not answer. The request
// moves if the budget and the state of its answer allow it.
func TestProbeIsNotLost(t *testing.T) {
	for _, v := range []struct {
		name    string
		budget  float64
		arrived bool
		moved   bool
	}{
		{"moved", 1, false, true},
		{"no budget", 0, false, false},
		{"its header has come", 1, true, false},
	} {
		f := newFlowTest(t)
		f.showsRate(f.a)
		set := *f.p.settings.Load()
		set.retries = retryBudget{true, 0, v.budget}
		f.p.settings.Store(&set)
		a := f.begin(f.a, workStream, 10)
		f.allow(a)
		if v.arrived {
			f.a.flow.arrived(&a.stream)
		}
		f.p.moveSoon(&a.stream)
		if got := a.caused.Load(); got != v.moved {
			t.Errorf("%s: canceled %v, want %v", v.name, got, v.moved)
		}
		if moved := f.a.flow.arrived(&a.stream); moved != v.moved {
			t.Errorf("%s: moved %v, want %v", v.name, moved, v.moved)
		}
	}
}
