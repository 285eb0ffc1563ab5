package pool

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func upstreamsOf(dials ...string) (list reverseproxy.UpstreamPool) {
	for _, dial := range dials {
		list = append(list, &reverseproxy.Upstream{Dial: dial, Host: new(reverseproxy.Host)})
	}
	return list
}

// chooser lets the least loaded worker be chosen.
type chooser struct {
	session *worker.Worker // to wait for if it is full
	wait    func(context.Context) error
	chosen  func()
	waits   int
	renew   func() Offers // of a source that follows its upstreams
}

func (c *chooser) Choose(_ context.Context, among *Candidates) Choice {
	choice := Choice{Request: &kvscore.Request{Prompt: cache.Prompt{Tokens: 10}, Streamed: true}, Policy: &kvscore.LeastLoad{}, Bound: -1}
	for _, w := range among.Full {
		if w == c.session {
			choice.SessionWorker = w
		}
	}
	if !among.Granted {
		choice.Wait, c.wait = c.wait, nil
	}
	return choice
}

func (c *chooser) Chosen(*Candidates, int, bool) {
	if c.chosen != nil {
		c.chosen()
	}
}

func (c *chooser) Waits(string) { c.waits++ }

func (c *chooser) Renew() (Offers, bool) {
	if c.renew == nil {
		return Offers{}, false
	}
	return c.renew(), true
}

// hasRoom has an engine of a type report its context.
func hasRoom(w *worker.Worker, tokens int64, kind string) {
	w.Learn(engine.Info{Type: kind, ContextTokens: tokens})
}

var anyWorker = Wants{Rank: AnyRank, Kind: worker.KindStream, Patience: time.Minute}

func (o Offers) workers() (list []*worker.Worker) {
	for _, row := range o.Table.Rows {
		list = append(list, row.Worker)
	}
	return list
}

// limited returns a pool with workers that run so many requests, and their offers.
func limited(t testing.TB, limits ...int) (*Pool, []*worker.Worker, Offers) {
	t.Helper()
	var set []worker.Settings
	var dials []string
	for i, n := range limits {
		dials = append(dials, fmt.Sprintf("%c:1", 'a'+i))
		set = append(set, worker.Settings{Dial: dials[i], MaxRunning: worker.RequestLimit(n)})
	}
	p := testPool(t, wanted(set...))
	o := new(Tables).Offers(p, upstreamsOf(dials...), nil)
	return p, o.workers(), o
}

// seatOn takes a seat on a worker.
func (p *Pool) seatOn(w *worker.Worker) *Seat {
	s := new(Seat)
	p.SeatAt(w, w.Target(0), &kvscore.Request{}, s)
	return s
}

// TestSeatEndsOnce leaves seats more than once, and panics while one is taken.
func TestSeatEndsOnce(t *testing.T) {
	p, workers, o := limited(t, 2)
	var one, two, three Seat
	for _, s := range []*Seat{&one, &two} {
		if _, err := p.Seat(t.Context(), &anyWorker, &o, new(chooser), s); err != nil || s.Worker != workers[0] || s.Upstream != o.Ups[0] {
			t.Fatalf("error %v, got %+v", err, s)
		}
	}
	one.Leave(true, nil)
	one.Leave(true, nil)
	func() {
		defer func() { _ = recover() }()
		_, _ = p.Seat(t.Context(), &anyWorker, &o, &chooser{chosen: func() { panic("of a policy") }}, &three)
		t.Error("nothing panicked")
	}()
	if n, _ := workers[0].Running(); n != 1 || p.Scheduler.Stats().Leases != 1 {
		t.Errorf("%d slots, %+v", n, p.Scheduler.Stats())
	}
	two.Leave(false, nil)
	if n, _ := workers[0].Running(); n != 0 || p.Scheduler.Stats().Leases != 0 {
		t.Errorf("%d slots, %+v", n, p.Scheduler.Stats())
	}
}

// TestSeatOfAFullPool has all workers full, and then frees one.
func TestSeatOfAFullPool(t *testing.T) {
	gone := errors.New("gone")
	for _, v := range []struct {
		name    string
		by      chooser
		want    Wants
		free    int // the worker that gets a free slot; -1: the client leaves
		then    int // another one later
		err     error
		at      int // the worker of the seat; -1 is any
		waiting int // how often the request waits
	}{
		{"Freed", chooser{}, anyWorker, 1, -1, nil, 1, 1},
		{"ClientLeaves", chooser{}, anyWorker, -1, -1, context.Canceled, 0, 1},
		{"TooLong", chooser{}, Wants{Rank: AnyRank, Kind: worker.KindStream}, 0, -1, ErrWaited, 0, 1},
		{"NoSlotIsNeeded", chooser{}, Wants{Rank: AnyRank}, 0, -1, nil, -1, 0},
		{"WaitFails", chooser{wait: func(context.Context) error { return gone }}, Wants{Rank: AnyRank}, 0, -1, gone, 0, 0},
		{"ForItsSession", chooser{}, anyWorker, 1, 0, nil, 0, 2}, // the slot of the other one goes back
	} {
		t.Run(v.name, func(t *testing.T) {
			p, workers, o := limited(t, 1, 1)
			before := []*Seat{p.seatOn(workers[0]), p.seatOn(workers[1])}
			if v.name == "ForItsSession" {
				v.by.session = workers[0]
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var s Seat
			done := make(chan error, 1)
			go func() {
				_, err := p.Seat(ctx, &v.want, &o, &v.by, &s)
				done <- err
			}()
			if v.waiting > 0 && v.err != ErrWaited { //nolint:errorlint // it is the same
				for p.Waiting() == 0 {
					time.Sleep(time.Millisecond)
				}
				if v.free < 0 {
					cancel()
				} else {
					before[v.free].Leave(false, nil)
				}
				for v.then >= 0 && (p.Waiting() == 0 || workers[v.free].IsFull()) {
					time.Sleep(time.Millisecond)
				}
				if v.then >= 0 {
					before[v.then].Leave(false, nil)
				}
			}
			if err := <-done; !errors.Is(err, v.err) {
				t.Fatalf("error %v", err)
			}
			if v.err == nil && v.at >= 0 && s.Worker != workers[v.at] || v.by.waits != v.waiting {
				t.Errorf("waited %d times, got %s", v.by.waits, s.Worker.Dial)
			}
			s.Leave(false, nil)
			for i := range before {
				before[i].Leave(false, nil)
			}
			for _, w := range workers {
				if n, _ := w.Running(); n != 0 {
					t.Errorf("%s has %d slots taken", w.Dial, n)
				}
			}
			if p.Scheduler.Stats().Leases != 0 || p.Waiting() != 0 {
				t.Error("something is left")
			}
		})
	}
}

// TestNewcomersDoNotOvertake frees a slot and sends a new request before the queued request
// gets the slot.
func TestNewcomersDoNotOvertake(t *testing.T) {
	p, workers, o := limited(t, 1)
	p.seatOn(workers[0])
	var second, third Seat
	got := make(chan error, 1)
	go func() {
		_, err := p.Seat(t.Context(), &anyWorker, &o, new(chooser), &second)
		got <- err
	}()
	for p.Waiting() == 0 {
		time.Sleep(time.Millisecond)
	}
	workers[0].FreeSlot() // and is not said to be free yet
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	newcomers := o
	if _, err := p.Seat(ctx, &anyWorker, &newcomers, new(chooser), &third); err == nil {
		t.Error("the newcomer got the slot")
	}
	p.queue.freed(workers[0])
	if err := <-got; err != nil {
		t.Error(err)
	}
	second.Leave(true, nil)
}

// TestWorkerGetsAnotherID gives a full worker another id while a request waits. The request
// gets the slot as soon as it is free, and its offers name the worker by the new id.
func TestWorkerGetsAnotherID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, workers, o := limited(t, 1)
		before, s := p.seatOn(workers[0]), new(Seat)
		got := make(chan error, 1)
		go func() {
			_, err := p.Seat(t.Context(), &anyWorker, &o, new(chooser), s)
			got <- err
		}()
		synctest.Wait()
		p.Apply(wanted(worker.Settings{Dial: "a:1", ID: 7, MaxRunning: 1}).WithDefaults())
		freed := time.Now()
		before.Leave(true, nil)
		if err := <-got; err != nil || s.Worker.ID != 7 || o.Worker(7) != s.Worker {
			t.Errorf("error %v, worker %d, of the offers %v", err, s.Worker.ID, o.workers())
		}
		if d := time.Since(freed); d > 0 {
			t.Errorf("the request waited for %s after a slot was free", d)
		}
		s.Leave(true, nil)
	})
}

// TestJudge shows the verdict on a worker, and which of two the request gets.
func TestJudge(t *testing.T) {
	for _, v := range []struct {
		name string
		set  func(p *Pool, w *worker.Worker, want *Wants)
		want Verdict
		both Verdict // the tier if the other worker is the same
	}{
		{"Fits", func(*Pool, *worker.Worker, *Wants) {}, Fits, Fits},
		{"Full", func(_ *Pool, w *worker.Worker, _ *Wants) { w.TakeSlot() }, Full, Fits},
		{"MarkedDown", func(_ *Pool, w *worker.Worker, _ *Wants) { w.Health.Fail(time.Now(), time.Now(), 0, false) }, MarkedDown, MarkedDown},
		{"Draining", func(_ *Pool, w *worker.Worker, _ *Wants) { w.AskDrain(true) }, Draining, Draining},
		{"DrainingMarked", func(_ *Pool, w *worker.Worker, _ *Wants) {
			w.AskDrain(true)
			w.Health.Fail(time.Now(), time.Now(), 0, false)
		}, DrainingMarked, DrainingMarked},
		{"DrainingAndFull", func(_ *Pool, w *worker.Worker, _ *Wants) {
			w.AskDrain(true)
			w.TakeSlot()
		}, Draining, Draining},
		{"Short", func(_ *Pool, w *worker.Worker, want *Wants) {
			want.Prompt, want.Answer = 90, 11
			hasRoom(w, 100, engine.VLLM)
		}, Short, Short},
		{"ShortAlone", func(_ *Pool, w *worker.Worker, want *Wants) {
			want.Prompt, want.Answer = 90, 11
			hasRoom(w, 100, engine.LlamaCpp)
		}, Fits, Fits},
		{"ShortAndFull", func(_ *Pool, w *worker.Worker, want *Wants) {
			want.Prompt = 101
			hasRoom(w, 100, engine.VLLM)
			w.TakeSlot()
		}, Short + Full, Short},
		{"ShortAndDraining", func(_ *Pool, w *worker.Worker, want *Wants) {
			want.Prompt = 101
			hasRoom(w, 100, engine.VLLM)
			w.AskDrain(true)
		}, Short + Draining, Short + Draining},
		{"HasRefused", func(_ *Pool, w *worker.Worker, want *Wants) {
			want.Beyond = 100
			hasRoom(w, 100, engine.VLLM)
		}, Tried, NotNamed},
		{"Longer", func(_ *Pool, w *worker.Worker, want *Wants) {
			want.Beyond = 100
			hasRoom(w, 101, engine.VLLM)
		}, Fits, Fits},
		{"Tried", func(_ *Pool, w *worker.Worker, want *Wants) { want.Tried = append(want.Tried, w) }, Tried, NotNamed},
		{"OtherModel", func(p *Pool, w *worker.Worker, want *Wants) {
			want.Model = "m"
			w.Configure(worker.Settings{Models: []string{"x"}})
			for _, o := range p.All() {
				if o != w && !o.HasConfiguredModels() {
					o.Configure(worker.Settings{Models: []string{"m"}})
				}
			}
		}, OtherModels, Fits}, // nobody is known to serve it
		{"Taint", func(_ *Pool, _ *worker.Worker, want *Wants) { want.Taints = []string{"big"} }, NotAllowed, NotNamed},
		{"ID", func(_ *Pool, _ *worker.Worker, want *Wants) { want.Workers = []uint64{1} }, NotAllowed, NotNamed},
		{"Rank", func(_ *Pool, _ *worker.Worker, want *Wants) { want.Rank = 1 }, NoRank, NotNamed},
		{"Isolation", func(_ *Pool, _ *worker.Worker, want *Wants) { want.Isolated = true }, SharesCache, NotNamed},
		{"Session", func(_ *Pool, _ *worker.Worker, want *Wants) { want.Session = true }, NotAllowed, NotNamed},
	} {
		t.Run(v.name, func(t *testing.T) {
			p, workers, o := limited(t, 1, 1)
			want := anyWorker
			v.set(p, workers[0], &want)
			for i, got := range p.Judge(&want, o, time.Now()) {
				if i == 0 && got != v.want {
					t.Errorf("%s, want %s", got, v.want)
				}
			}
			if v.both == NotNamed {
				return
			}
			v.set(p, workers[1], &want)
			if c := p.Candidates(&want, o, nil, time.Now()); c.Tier != v.both || len(c.Targets)+len(c.Full) != 2 {
				t.Errorf("of two: tier %s, %d free and %d full", c.Tier, len(c.Targets), len(c.Full))
			}
		})
	}
}

// TestRequestsWaitForAWorkerWithRoom has a worker with room for a request that is full or ill, beside a
// free one whose context is too short. The request gets the short one only if no other is left.
func TestRequestsWaitForAWorkerWithRoom(t *testing.T) {
	for name, v := range map[string]struct {
		set  func(long *worker.Worker, want *Wants)
		free []int // positions of the candidates
	}{
		"well":        {func(*worker.Worker, *Wants) {}, []int{1}},
		"full":        {func(long *worker.Worker, _ *Wants) { long.TakeSlot() }, nil},
		"marked down": {func(long *worker.Worker, _ *Wants) { long.Health.Fail(time.Now(), time.Now(), 0, false) }, []int{1}},
		"tried":       {func(long *worker.Worker, want *Wants) { want.Tried = []*worker.Worker{long} }, []int{0}},
		"short, too":  {func(long *worker.Worker, _ *Wants) { hasRoom(long, 150, engine.VLLM) }, []int{0, 1}},
		"unknown":     {func(long *worker.Worker, _ *Wants) { hasRoom(long, 0, engine.VLLM) }, []int{1}},
	} {
		p, workers, o := limited(t, 1, 1)
		want := anyWorker
		want.Prompt = 200
		hasRoom(workers[0], 100, engine.VLLM)
		hasRoom(workers[1], 1000, engine.VLLM)
		v.set(workers[1], &want)
		var free []int
		for _, w := range p.Candidates(&want, o, nil, time.Now()).Workers {
			free = append(free, slices.Index(workers, w))
		}
		if !slices.Equal(free, v.free) {
			t.Errorf("%s: the candidates are %v, want %v", name, free, v.free)
		}
	}
}

// TestTablesHold looks the same list up again and again, and changes what is behind it in
// between.
func TestTablesHold(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}, worker.Settings{Dial: "b:1"}))
	list, tables := upstreamsOf("a:1", "b:1", "a:1"), new(Tables)
	ranked := func(id uint64, ranks int) worker.Settings {
		return worker.Settings{Dial: "a:1", ID: id, Engine: "vllm", DPSize: ranks}
	}
	last := tables.Offers(p, list, nil).Table
	for _, v := range []struct {
		what   string
		change func()
		kept   bool
	}{
		{"nothing", func() {}, true},
		{"a drain", func() { p.Worker("a:1").AskDrain(true) }, true},
		{"another worker", func() { p.Worker("c:1") }, false},
		{"an id and ranks", func() { p.Apply(wanted(ranked(7, 2)).WithDefaults()) }, false},
		{"ranks", func() { p.Apply(wanted(ranked(7, 4)).WithDefaults()) }, false},
		{"nothing that is seen here", func() { p.Apply(wanted(ranked(7, 4)).WithDefaults()) }, true},
		{"a worker that goes", func() { p.dropAt("b:1") }, false},
		{"a list of the same addresses", func() { list = upstreamsOf("a:1", "b:1", "a:1") }, true},
		{"another list", func() { list = upstreamsOf("b:1", "a:1", "a:1") }, false},
		{"the list changed in place", func() { list[1] = upstreamsOf("c:1")[0] }, false},
	} {
		v.change()
		tab := tables.Offers(p, list, nil).Table
		if (tab == last) != v.kept {
			t.Errorf("after %s: kept %v, want %v", v.what, tab == last, v.kept)
		}
		for i, up := range list {
			if row := tab.Rows[i]; row.Worker != p.Worker(up.Dial) || len(row.Targets) != row.Worker.Ranks() {
				t.Fatalf("after %s: %s is worker %d with %d ranks", v.what, up.Dial, row.Worker.ID, len(row.Targets))
			}
		}
		last = tables.Offers(p, list, nil).Table // the first may have made workers known, which makes it void
	}
	repl := caddy.NewEmptyReplacer()
	for i := range 3 { // an address with a placeholder is another one each time
		repl.Set("up", fmt.Sprintf("d:%d", i+1))
		if w := tables.Offers(p, upstreamsOf("{up}"), repl).workers()[0]; w != p.Known(fmt.Sprintf("d:%d", i+1)) {
			t.Errorf("offered %s", w.Dial)
		}
	}
	if p.Peek(upstreamsOf("e:1"), nil); p.Known("e:1") != nil {
		t.Error("to peek makes a worker known")
	}
}

// dropAt drops the worker at an address.
func (p *Pool) dropAt(dial string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if w := p.workers[dial]; w != nil {
		p.drop(w)
	}
}

// TestTablesHeedNewModels changes the models of workers after the table was made.
func TestTablesHeedNewModels(t *testing.T) {
	p, workers, o := limited(t, 0, 0, 0)
	want := func(model, dials string) {
		t.Helper()
		wants := anyWorker
		wants.Model = model
		got := ""
		for _, w := range p.Candidates(&wants, o, nil, time.Now()).Workers {
			got += w.Dial[:1]
		}
		if got != dials {
			t.Errorf("%s: offered %s, want %s", model, got, dials)
		}
	}
	serve := func(w *worker.Worker, models ...string) {
		w.SetList(listOf(models...))
	}
	want("x", "abc") // nobody tells
	serve(workers[0], "x", "y")
	serve(workers[1], "x")
	want("x", "ab")
	want("y", "a")
	want("z", "abc")
	want("x:adapter", "ab")
	workers[2].Configure(worker.Settings{Models: []string{"y"}})
	want("y", "ac")
	workers[1].SetList(nil)
	want("x", "a")
}

// TestLateBookingLeavesNothingOfAForgottenWorker drops a worker between a request's
// list of candidates and its booking.
func TestLateBookingLeavesNothingOfAForgottenWorker(t *testing.T) {
	p, workers, o := limited(t, 0)
	var s Seat
	by := &chooser{wait: func(context.Context) error { return nil }}
	c := p.Candidates(&anyWorker, o, nil, time.Now())
	p.dropAt("a:1")
	choice := by.Choose(t.Context(), c)
	(&seating{Pool: p, want: &anyWorker, by: by, seat: &s}).sit(c, &choice)
	s.Leave(true, nil)
	if _, known := p.Scheduler.Load(time.Now(), workers[0].Target(0)); known {
		t.Error("the scheduler knows the worker")
	}
}

// TestWorkersChangeWhileRequestsChoose changes ids and ranks of workers, drains, adds and
// removes workers while requests choose among them. The lists are static and dynamic.
func TestWorkersChangeWhileRequestsChoose(t *testing.T) {
	const workers = 12
	var dials []string
	for i := range workers {
		dials = append(dials, fmt.Sprintf("127.0.0.1:%d", i+1))
	}
	p := testPool(t, wanted())
	var tables Tables
	var choosing, changing sync.WaitGroup
	stop := make(chan struct{})
	changing.Go(func() {
		for n := uint64(1); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			var set []worker.Settings
			for i, dial := range dials {
				if rand.IntN(4) > 0 {
					set = append(set, worker.Settings{Dial: dial, ID: uint64(i+1) + n/4%3, Engine: "vllm", DPSize: 1 + rand.IntN(3), Drain: new(rand.IntN(4) == 0)})
				}
			}
			p.Apply(wanted(set...).WithDefaults())
			p.dropAt(dials[rand.IntN(workers)])
		}
	})
	for g := range 4 {
		choosing.Go(func() {
			for range 300 {
				list := upstreamsOf(dials...)
				if g%2 == 1 {
					list = upstreamsOf(dials[rand.IntN(workers/2):]...)
				}
				var s Seat
				o := tables.Offers(p, list, nil)
				if _, err := p.Seat(t.Context(), &anyWorker, &o, new(chooser), &s); err != nil || s.Upstream.Dial != s.Worker.Dial || s.Lease.Target() != s.Target {
					t.Errorf("error %v, got %+v", err, s.Target)
				}
				s.Leave(true, nil)
			}
		})
	}
	choosing.Wait()
	close(stop)
	changing.Wait()
	if s := p.Scheduler.Stats(); s.Leases != 0 || s.PolicyFaults != 0 {
		t.Errorf("at the end: %+v", s)
	}
	for i, row := range tables.Offers(p, upstreamsOf(dials...), nil).Table.Rows {
		if w := p.Worker(dials[i]); row.Worker != w || len(row.Targets) != w.Ranks() {
			t.Errorf("%s: the table has another worker or other ranks", dials[i])
		} else if _, known := p.Scheduler.Load(time.Now(), w.Target(0)); !known {
			t.Errorf("%s: worker %d has no books", dials[i], w.ID)
		}
	}
}

// BenchmarkSeat takes a seat among eight workers and leaves it, while nothing waits. With hold off there is one
// tenant, with hold auto there are two. The ratio is the median of those of each 64 seats.
func BenchmarkSeat(b *testing.B) {
	var pools [2]*Pool
	var offers [2]Offers
	for k, hold := range []string{HoldOff, HoldAuto} {
		pools[k], _, offers[k] = limited(b, make([]int, 8)...)
		set := *pools[k].Settings.Load()
		set.Hold = hold
		pools[k].Settings.Store(&set)
	}
	by := &priced{request: kvscore.Request{Prompt: cache.Prompt{Root: 1, Tokens: 100}, Streamed: true}}
	var s Seat
	var ratios []float64
	var took [2]time.Duration
	for i := 0; b.Loop(); i++ {
		for _, k := range [2]int{i % 2, 1 - i%2} {
			begun, want := time.Now(), anyWorker
			for n := range 64 {
				want.Tenant = uint64(n * k % 2) //nolint:gosec // not negative
				if _, err := pools[k].Seat(b.Context(), &want, &offers[k], by, &s); err != nil {
					b.Fatal(err)
				}
				s.Leave(true, nil)
			}
			took[k] = time.Since(begun)
		}
		ratios = append(ratios, float64(took[1])/float64(took[0]))
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/2], "auto/off")
}
