package pool

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// progressed records output of a worker.
func progressed(w *worker.Worker, t time.Time) {
	(&worker.Attempt{Worker: w, Kind: worker.KindStream}).Progress(t)
}

// flowTest is a pool of two workers, a and b, at a time of its own.
type flowTest struct {
	p    *Pool
	a, b *worker.Worker
	now  time.Time
}

// The limits, as docs/reliability.md has them. A check comes every second, and three in a row find a worker hung.
const (
	hungAfter, endedAfter    = 15 * time.Second, 5 * time.Second
	hungPrefills, quietTimes = 4, 4
	hungChecks, leastRate    = 3, 500.0
)

func newFlowTest(t *testing.T) *flowTest {
	t.Helper()
	// without the upkeep, which has a clock of its own
	p := &Pool{
		registry: &registry{log: log{Name: "test"}, Scheduler: kvscore.NewScheduler(kvscore.Settings{}), workers: make(map[string]*worker.Worker)},
	}
	p.Budget.pool = p.registry
	p.Settings.Store(wanted().WithDefaults())
	p.queue.workers = p.registry
	return &flowTest{p, p.Worker("a:1"), p.Worker("b:1"), epoch}
}

// booked is an attempt with its booking.
type booked struct {
	Seat
	caused atomic.Bool // it was canceled to move
}

// begin books an attempt on the worker.
func (f *flowTest) begin(w *worker.Worker, kind worker.AttemptKind, ahead int64) *booked {
	var sel kvscore.Selection
	sel.Rand = newRandom()
	_, lease := f.p.Scheduler.Select(f.now, &kvscore.Request{Prompt: cache.Prompt{Tokens: ahead}, Streamed: true}, f.p.Scheduler.Refs(w.Target(0)), -1, &kvscore.LeastLoad{}, &sel)
	a := &booked{Seat: Seat{Attempt: worker.Attempt{Worker: w, Begun: f.now, Kind: kind, Ahead: ahead}, Target: w.Target(0), Lease: lease, pool: f.p}}
	a.Enter(false)
	return a
}

// showsRate has a worker show that it is as fast as is reckoned with.
func (f *flowTest) showsRate(w *worker.Worker) {
	a := f.begin(w, worker.KindStream, 512)
	a.Lease.FirstToken(f.now.Add(time.Duration(512 / leastRate * float64(time.Second))))
	a.Lease.End(true, nil)
	a.Exit()
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
	ups := reverseproxy.UpstreamPool{{Dial: f.a.Dial}, {Dial: f.b.Dial}}
	want := Wants{Rank: AnyRank, Kind: worker.KindStream, Tried: []*worker.Worker{f.a}}
	a.MayMove(want, f.p.Peek(ups, nil), func(bool) { a.caused.Store(true) })
}

// pass lets time pass while the given workers produce output. It returns the time until the
// first one was found hung, 0 if none was.
func (f *flowTest) pass(d time.Duration, from ...*worker.Worker) time.Duration {
	for i := range int(d / worker.HungCheck) {
		f.now = f.now.Add(worker.HungCheck)
		for _, w := range from {
			progressed(w, f.now)
		}
		f.p.checkSilence(f.now)
		if f.a.IsHung() || f.b.IsHung() {
			return time.Duration(i+1) * worker.HungCheck
		}
	}
	return 0
}

// stream begins a stream on a.
func (f *flowTest) stream(ahead int64) *booked { return f.begin(f.a, worker.KindStream, ahead) }

// hang lets time pass until a is found hung, while b has output.
func (f *flowTest) hang(t *testing.T) {
	t.Helper()
	if f.pass(time.Minute, f.b) == 0 {
		t.Fatal("it does not hang")
	}
}

// budget sets how many retries there may be.
func (f *flowTest) budget(n float64) {
	set := *f.p.Settings.Load()
	set.RetryBudget = &RetryBudget{PerSecond: n / budgetMemory.Seconds()}
	f.p.Settings.Store(&set)
}

// TestWorkerHangs is silent on a stream for longer and longer.
func TestWorkerHangs(t *testing.T) {
	soon := hungAfter + (hungChecks-1)*worker.HungCheck
	for _, v := range []struct {
		name string
		set  func(f *flowTest)
		flow string        // the workers with output
		want time.Duration // 0 is never
	}{
		{"a stream", func(f *flowTest) { f.stream(10) }, "b", soon},
		{"many streams", func(f *flowTest) {
			for range 32 {
				f.stream(10)
			}
		}, "b", soon},
		{"nothing is asked of it", func(*flowTest) {}, "b", 0},
		{"its stream has ended", func(f *flowTest) {
			x, y := f.stream(10), f.stream(10)
			x.Exit()
			y.Exit()
		}, "b", 0},
		{"nobody makes progress", func(f *flowTest) { f.stream(10); f.begin(f.b, worker.KindStream, 10) }, "", 0},
		{"both stop, one of them a moment later", func(f *flowTest) {
			f.stream(10)
			f.begin(f.b, worker.KindStream, 10)
			f.pass(2*time.Second, f.b)
		}, "", 0},
		{"it makes progress", func(f *flowTest) { f.stream(10) }, "ab", 0},
		{"not streamed", func(f *flowTest) { f.begin(f.a, worker.KindPlain, 10) }, "b", 0},
		{"no inference", func(f *flowTest) { f.begin(f.a, worker.KindOther, 10) }, "b", 0},
		{"also with an answer to make that is silent", func(f *flowTest) { f.begin(f.a, worker.KindPlain, 10); f.stream(10) }, "b", soon},
		{"the client does not read", func(f *flowTest) { f.stream(10).Waits(false) }, "b", 0},
		{"a long prompt", func(f *flowTest) { f.stream(50 * leastRate) }, "b", // predicted to take 50 s
			hungPrefills*50*time.Second + (hungChecks-1)*worker.HungCheck},
		{"the prompts that came later", func(f *flowTest) {
			f.stream(10)
			f.now = f.now.Add(5 * time.Second)
			f.stream(500 * leastRate)
		}, "b", soon - 5*time.Second},
		{"a stream that waits for a client, and a new one", func(f *flowTest) {
			f.stream(10).Waits(false)
			progressed(f.a, f.now)
			f.now = f.now.Add(time.Minute)
			f.stream(10)
		}, "b", soon},
	} {
		t.Run(v.name, func(t *testing.T) {
			f := newFlowTest(t)
			v.set(f)
			var flow []*worker.Worker
			for _, name := range v.flow {
				flow = append(flow, map[rune]*worker.Worker{'a': f.a, 'b': f.b}[name])
			}
			if got := f.pass(10*time.Minute, flow...); got != v.want {
				t.Errorf("found to hang after %v, want %v", got, v.want)
			}
			if f.b.IsHung() {
				t.Error("the other one is said to hang")
			}
			if v.want > 0 && f.a.Health.Available(f.now) {
				t.Error("it is not marked down")
			}
		})
	}
}

// TestFrozenWorkerHasTheLastWork has a worker freeze while it has the only stream of the pool. The other one
// answers the router's questions.
func TestFrozenWorkerHasTheLastWork(t *testing.T) {
	soon := hungAfter + (hungChecks-1)*worker.HungCheck
	for name, v := range map[string]struct {
		reach           worker.Reach
		tokens, answers bool
		want            time.Duration
	}{
		"frozen":                           {worker.Unresponsive, false, true, soon},
		"shuts down":                       {worker.Refusing, true, true, soon - hungAfter + endedAfter},
		"it answers questions":             {worker.ReachUnknown, false, true, 0}, // it may load the model
		"it answers questions, and stalls": {worker.ReachUnknown, true, true, soon + (quietTimes-1)*hungAfter},
		"nobody answers a question":        {worker.Unresponsive, true, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFlowTest(t)
			f.stream(10)
			if v.tokens {
				f.now = f.now.Add(worker.HungCheck)
				progressed(f.a, f.now)
			}
			got := time.Duration(0)
			for i := range 300 {
				if v.reach != worker.ReachUnknown {
					f.a.Health.RecordAway(f.now, v.reach)
				}
				if v.answers {
					f.b.RecordOwn(f.now, http.StatusOK, nil)
				}
				if f.pass(worker.HungCheck) > 0 {
					got = time.Duration(i+1) * worker.HungCheck
					break
				}
			}
			if got != v.want || f.b.IsHung() {
				t.Errorf("found to hang after %v, want %v", got, v.want)
			}
		})
	}
}

// TestOneLateByteIsEnough stands still for so long that a check sees it.
func TestOneLateByteIsEnough(t *testing.T) {
	f := newFlowTest(t)
	f.stream(10)
	f.now = f.now.Add(time.Hour)
	for range 20 {
		progressed(f.b, f.now)
		f.p.checkSilence(f.now)
		f.now = f.now.Add(worker.HungCheck)
		progressed(f.a, f.now) // it comes a moment after the check
		if f.a.IsHung() {
			t.Fatal("found to hang, though something came")
		}
	}
}

// TestHungWorkerFlowsAgain lets something come.
func TestHungWorkerFlowsAgain(t *testing.T) {
	f := newFlowTest(t)
	f.stream(10)
	f.hang(t)
	for range 60 {
		f.now = f.now.Add(worker.HungCheck)
		f.p.checkSilence(f.now)
	}
	if !f.a.IsHung() {
		t.Fatal("it is forgotten that it hangs")
	}
	f.now = f.now.Add(worker.HungCheck)
	progressed(f.a, f.now)
	f.p.checkSilence(f.now)
	if f.a.IsHung() || !f.a.Health.Available(f.now) {
		t.Errorf("hangs: %v, available: %v", f.a.IsHung(), f.a.Health.Available(f.now))
	}
}

// TestHungWorkerStaysMarkedWhenItsServerAnswers freezes a whole engine, so that it has a mark of
// absence when it is found hung. Then its HTTP server answers again, and its core does not.
func TestHungWorkerStaysMarkedWhenItsServerAnswers(t *testing.T) {
	f := newFlowTest(t)
	f.stream(10)
	for range 30 {
		f.a.Health.RecordAway(f.now, worker.Unresponsive)
		f.pass(worker.HungCheck, f.b)
	}
	if !f.a.IsHung() {
		t.Fatal("the worker is not hung")
	}
	f.p.Report(f.a, worker.Outcome{Kind: worker.OutcomeAnswered})
	if f.a.Health.Available(f.now) {
		t.Error("the worker is available at once")
	}
	f.now = f.now.Add(3 * time.Second) // the longest mark
	for want := range 2 {
		if got := f.a.Health.Available(f.now); got != (want == 0) {
			t.Errorf("available with %d requests: %v", want, got)
		}
		f.a.Health.Admit(time.Now())
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
		{"some room", 100, func(f *flowTest) { f.b.LimitSlots(3) }, 3, 4},
		{"no room", 100, func(f *flowTest) {
			f.b.LimitSlots(1)
			f.b.TakeSlot()
		}, 0, 1},
		{"the other is marked down", 100, func(f *flowTest) { f.b.Health.Fail(time.Now(), time.Now(), 0, false) }, 0, 0},
		{"the other drains", 100, func(f *flowTest) { f.b.AskDrain(true) }, 0, 0},
		{"it has given no first token", 100, func(f *flowTest) {
			f.p.Scheduler = kvscore.NewScheduler(kvscore.Settings{})
			f.p.Scheduler.Declare(f.a.Target(0), 1<<20)
			f.p.Scheduler.Declare(f.b.Target(0), 1<<20)
		}, 0, 0},
	} {
		t.Run(v.name, func(t *testing.T) {
			f := newFlowTest(t)
			f.showsRate(f.a)
			v.set(f)
			f.budget(v.budget)
			var all []*booked
			for i := range 16 {
				a := f.stream(10)
				f.allow(a)
				all = append(all, a)
				if i%2 == 0 && a.Arrived() {
					t.Error("moved before it hangs")
				}
				a.Waits(true)
			}
			f.hang(t)
			for i, m := range f.moved(t, all, v.want) {
				if m && i%2 == 0 {
					t.Error("a request was moved whose header had come")
				}
			}
			for range v.want { // the retries take their slots
				f.b.TakeSlot()
			}
			f.b.FreeSlot()
			f.p.checkSilence(f.now.Add(worker.HungCheck))
			f.moved(t, all, v.later)
		})
	}
}

// TestStreamsThatCannotMoveEnd has streams on a worker that hangs, and no other worker that could take them. The worker
// never gave a first token. It may send its answers whole, so a stream that can move does so only after a longer time.
func TestStreamsThatCannotMoveEnd(t *testing.T) {
	for name, v := range map[string]struct {
		away, tokens bool
		set          func(*flowTest, *booked)
		ends, moves  bool
	}{
		"frozen":                        {true, true, func(*flowTest, *booked) {}, true, false},
		"frozen, without a token":       {true, false, func(*flowTest, *booked) {}, true, false},
		"stalled":                       {false, true, func(*flowTest, *booked) {}, true, false},
		"may load the model":            {false, false, func(*flowTest, *booked) {}, false, false},
		"its client does not read":      {true, true, func(_ *flowTest, a *booked) { a.Waits(false) }, false, false},
		"can move when there is room":   {true, true, func(f *flowTest, a *booked) { f.allow(a); f.b.AskDrain(true) }, false, false},
		"can move":                      {true, false, func(f *flowTest, a *booked) { f.allow(a) }, false, true},
		"a worker that flows meanwhile": {true, true, func(f *flowTest, _ *booked) { f.pass(time.Second, f.a) }, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFlowTest(t)
			a, ended := f.stream(10), false
			a.MayEnd(func() { ended = true })
			f.stream(10) // is what the worker is found by
			if f.now = f.now.Add(worker.HungCheck); v.tokens {
				progressed(f.a, f.now)
			}
			f.hang(t)
			if v.set(f, a); v.away {
				f.a.Health.RecordAway(f.now, worker.Unresponsive)
			}
			f.now = f.now.Add(quietTimes*hungAfter - worker.HungCheck)
			if f.p.checkSilence(f.now); ended || a.caused.Load() {
				t.Error("ended or moved too soon")
			}
			f.now = f.now.Add(worker.HungCheck)
			if f.p.checkSilence(f.now); ended != v.ends || a.caused.Load() != v.moves {
				t.Errorf("ended: %v, want %v; moved: %v, want %v", ended, v.ends, a.caused.Load(), v.moves)
			}
		})
	}
}

// TestProbeIsNotLost sends a request to a hung worker that does not answer. The request
// moves if the budget and the state of its answer allow it.
func TestProbeIsNotLost(t *testing.T) {
	for _, v := range []struct {
		name    string
		kind    worker.AttemptKind
		budget  float64
		arrived bool
		moved   bool
	}{
		{"moved", worker.KindStream, 10, false, true},
		{"moved, not streamed", worker.KindPlain, 10, false, true},
		{"no budget", worker.KindStream, 0, false, false},
		{"its header has come", worker.KindStream, 10, true, false},
	} {
		f := newFlowTest(t)
		f.showsRate(f.a)
		f.budget(v.budget)
		a := f.begin(f.a, v.kind, 10)
		f.allow(a)
		if v.arrived {
			a.Arrived()
		}
		f.a.Health.MarkHung(time.Time{}) // before the attempt began
		f.p.checkSilence(f.now.Add(hungAfter - worker.HungCheck))
		if a.caused.Load() {
			t.Errorf("%s: canceled too soon", v.name)
		}
		f.p.checkSilence(f.now.Add(hungAfter))
		if got := a.caused.Load(); got != v.moved {
			t.Errorf("%s: canceled %v, want %v", v.name, got, v.moved)
		}
		if moved := a.Arrived(); moved != v.moved {
			t.Errorf("%s: moved %v, want %v", v.name, moved, v.moved)
		}
	}
}

// TestHungProcessHasEnded has a hung worker refuse connections, or start anew: another process answers.
func TestHungProcessHasEnded(t *testing.T) {
	for name, end := range map[string]func(*Pool, *worker.Worker){
		"refused":   func(p *Pool, w *worker.Worker) { p.Report(w, worker.Outcome{Kind: worker.OutcomeRefused}) },
		"restarted": func(p *Pool, w *worker.Worker) { p.ClearCache(w, observe.ClearedRestarted) },
	} {
		p := testPool(t, wanted(worker.Settings{Dial: "a:1"}))
		w := p.Worker("a:1")
		w.Health.MarkHung(time.Time{})
		if end(p, w); w.IsHung() {
			t.Errorf("%s: the worker is still hung", name)
		}
	}
}
