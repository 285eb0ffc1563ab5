package affinity

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// each runs f in n goroutines and waits for them.
func each(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

func TestOneSwapOfManyWins(t *testing.T) {
	r := open(t, Options{})
	for round := range 300 {
		s := fmt.Sprint("s", round)
		var winners atomic.Int64
		var got [8]Binding
		each(len(got), func(i int) {
			b, ok, err := r.CompareAndSwap(s, 0, on(uint64(i)), time.Minute, RouterOnly)
			if err != nil {
				t.Error(err)
			}
			if ok {
				winners.Add(1)
			}
			got[i] = b
		})
		if n := winners.Load(); n != 1 {
			t.Fatalf("%d winners", n)
		}
		for _, b := range got {
			if b.Version != got[0].Version || b.Target != got[0].Target {
				t.Fatalf("winner seen as %+v and %+v", b, got[0])
			}
		}
	}
}

// A swap that wins has seen what it replaces: none of many increments is lost.
func TestSwapsLoseNoUpdate(t *testing.T) {
	r := open(t, Options{})
	const goroutines, increments = 8, 500
	mustPut(t, r, "s", 0, time.Hour, RouterOnly)
	each(goroutines, func(int) {
		for range increments {
			b, _ := r.Get("s")
			for ok := false; !ok; {
				b, ok, _ = r.CompareAndSwap("s", b.Version, on(b.Target.Worker+1), time.Hour, RouterOnly)
			}
		}
	})
	if b, _ := r.Peek("s"); b.Target.Worker != goroutines*increments {
		t.Fatalf("counted %d of %d", b.Target.Worker, goroutines*increments)
	}
}

// A binding does not end before the time that a caller got for it: renewal and expiry are ordered. The clock jumps so that deadlines
// are hit while sessions are being renewed and swept.
func TestRenewalRacesExpiry(t *testing.T) {
	var c fakeClock
	var l ends
	var early, expiries atomic.Int64
	r := open(t, Options{Clock: c.now, OnExpire: func(s string, b Binding, why Reason) {
		if b.Expires.After(c.now()) {
			early.Add(1)
		}
		l.record(s, b, why)
		expiries.Add(1)
	}})
	const sessions, ttl = 16, 100
	deadline := time.Now().Add(10 * time.Second)
	granted := make([]map[uint64]time.Time, 4)
	var stop atomic.Bool
	var background sync.WaitGroup
	background.Go(func() {
		for !stop.Load() {
			c.advance(time.Duration(1 + rand.Int64N(ttl)))
			r.sweep()
			runtime.Gosched()
		}
	})
	each(len(granted), func(i int) {
		mine := map[uint64]time.Time{}
		for n := 0; n < 15_000 || expiries.Load() < 300 && time.Now().Before(deadline); n++ {
			s := fmt.Sprint("s", rand.IntN(sessions))
			b, ok := r.Get(s)
			if !ok {
				b, _, _ = r.CompareAndSwap(s, 0, on(1), ttl, EngineBacked)
			}
			if b.Expires.After(mine[b.Version]) {
				mine[b.Version] = b.Expires
			}
		}
		granted[i] = mine
	})
	stop.Store(true)
	background.Wait()
	c.advance(ttl)
	r.sweep()
	settled(t, r)
	if early.Load() != 0 {
		t.Errorf("%d bindings ended before their deadline", early.Load())
	}
	if len(l.full) < 300 {
		t.Fatalf("only %d expiries: not a race", len(l.full))
	}
	for _, b := range l.full {
		for _, mine := range granted {
			if mine[b.Version].After(b.Expires) {
				t.Fatalf("version %d ended at %v, was granted until %v", b.Version, b.Expires, mine[b.Version])
			}
		}
	}
}

// The same at the narrowest place: a use comes between the check that the
// binding is overdue or idle, and its end.
func TestUseBeforeTheEndSavesTheBinding(t *testing.T) {
	var c fakeClock
	r := open(t, Options{Clock: c.now})
	mustPut(t, r, "s", 1, 100, RouterOnly)
	e := r.find(r.hash("s"), "s")
	used := e.used.Load()
	c.advance(99)
	r.Get("s")
	if r.expire(e, 100) {
		t.Error("expired although renewed")
	}
	if r.evict(e, used, 100, false) {
		t.Error("evicted although just used")
	}
	if _, ok := r.Get("s"); !ok {
		t.Error("gone")
	}
	if !r.evict(e, used, 100, true) || r.evict(e, used, 100, true) || r.expire(e, 1000) {
		t.Error("not ended exactly once")
	}
}

// Every engine-backed binding accepted is removed, reported or still there:
// one of these, once. Targets are unique, so every put on a live one replaces.
func TestEveryBindingEndsOnce(t *testing.T) {
	for _, tt := range []struct {
		name string
		max  int
	}{{"with room", 50_000}, {"full", 40}, {"tiny", 2}} {
		t.Run(tt.name, func(t *testing.T) {
			var c fakeClock
			var l ends
			r := open(t, Options{Clock: c.now, OnExpire: l.record, MaxSessions: tt.max})
			const goroutines, ops = 8, 6000
			var target atomic.Uint64
			var accepted, removed [goroutines][]uint64
			var refusals atomic.Int64
			each(goroutines, func(i int) {
				rnd := rand.New(rand.NewPCG(rand.Uint64(), 0))
				for n := range ops {
					s := fmt.Sprint("s", rnd.IntN(200))
					b, ok, err := Binding{}, false, error(nil)
					switch rnd.IntN(10) {
					case 0, 1, 2:
						b, err = r.Put(s, on(target.Add(1)), 5000, EngineBacked)
						ok = err == nil
					case 3, 4:
						old, _ := r.Peek(s)
						b, ok, err = r.CompareAndSwap(s, old.Version, on(target.Add(1)), 5000, EngineBacked)
					case 5:
						if b, gone := remove(r, s); gone {
							removed[i] = append(removed[i], b.Version)
						}
					case 6:
						c.advance(time.Duration(rnd.IntN(50)))
					case 7:
						if n%50 == 0 {
							r.sweep()
						}
					default:
						r.Get(s)
					}
					if errors.Is(err, ErrFull) {
						refusals.Add(1)
					} else if err != nil {
						t.Error(err)
					}
					if ok {
						accepted[i] = append(accepted[i], b.Version)
					}
				}
			})
			r.sweep()
			settled(t, r)
			fates := map[uint64]int{}
			for _, e := range l.take() {
				fates[e.version]++
			}
			for _, v := range removed {
				for _, v := range v {
					fates[v]++
				}
			}
			for _, e := range r.List("", 1<<30) {
				fates[e.Version]++
			}
			total := 0
			for _, v := range accepted {
				for _, v := range v {
					total++
					if fates[v] != 1 {
						t.Fatalf("version %d has %d fates", v, fates[v])
					}
				}
			}
			if len(fates) != total {
				t.Fatalf("%d accepted, %d ended or live", total, len(fates))
			}
			if r.Len() > tt.max {
				t.Fatalf("holds %d", r.Len())
			}
			t.Logf("%d accepted, %d refused", total, refusals.Load())
			if refusals.Load() > 0 && tt.max > 100 {
				t.Error("refused with room")
			}
			cacheHolds(t, r)
		})
	}
}

// cacheHolds checks that ristretto holds the entries of the roster, and has
// deleted all others.
func cacheHolds(t *testing.T, r *Ristretto) {
	t.Helper()
	r.cache.Wait()
	n := 0
	r.cache.IterValues(func(e *entry) bool {
		n++
		if e.ended || e.slot < 0 {
			t.Errorf("the cache still holds %q, which has ended", e.session)
		}
		return false
	})
	if cost := r.cache.MaxCost() - r.cache.RemainingCost(); n != r.Len() || cost != int64(n) {
		t.Errorf("the cache holds %d entries for %d bindings and accounts for %d", n, r.Len(), cost)
	}
}

func TestWritesAreSeen(t *testing.T) {
	r := open(t, Options{MaxSessions: 50_000})
	each(8, func(i int) {
		for n := range 3000 {
			s := fmt.Sprintf("%d-%d", i, n)
			b, err := r.Put(s, on(uint64(n)), time.Hour, RouterOnly)
			if err != nil {
				t.Error(err)
				return
			}
			if got, ok := r.Get(s); !ok || got.Version != b.Version {
				t.Errorf("put %+v, got %+v, %v", b, got, ok)
				return
			}
		}
	})
	cacheHolds(t, r)
	if r.Len() != 24_000 {
		t.Errorf("holds %d of 24000", r.Len())
	}
}

func TestWritesAreSeenWhenFull(t *testing.T) {
	r := open(t, Options{MaxSessions: 20})
	for n := range 20_000 {
		s := fmt.Sprint(n)
		b := mustPut(t, r, s, uint64(n), time.Hour, RouterOnly)
		if got, ok := r.Get(s); !ok || got.Version != b.Version {
			t.Fatalf("put %+v, got %+v, %v", b, got, ok)
		}
	}
	cacheHolds(t, r)
}

func TestCloseInFlight(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 60 {
		var closed atomic.Bool
		var late atomic.Int64
		r, err := NewRistretto(Options{MaxSessions: 50, Sweep: time.Millisecond, OnExpire: func(string, Binding, Reason) {
			if closed.Load() {
				late.Add(1)
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		var started, stopped sync.WaitGroup
		for i := range 8 {
			started.Add(1)
			stopped.Go(func() {
				rnd := rand.New(rand.NewPCG(rand.Uint64(), 0))
				for n := 0; ; n++ {
					if n == 20 {
						started.Done()
					}
					s := fmt.Sprint(rnd.IntN(200))
					_, err := r.Put(s, on(rnd.Uint64()), time.Millisecond, EngineBacked)
					if errors.Is(err, ErrClosed) && n > 20 {
						break
					}
					r.Get(s)
					r.Peek(s)
					r.List("", 3)
					remove(r, fmt.Sprint(rnd.IntN(200)))
					if i == 0 {
						r.SetLimits(20+n%60, 1<<20)
					}
				}
				if _, ok := r.Get("1"); ok {
					t.Error("a closed store found something")
				}
			})
		}
		started.Wait()
		each(2, func(int) {
			r.Close()
			closed.Store(true)
		})
		stopped.Wait()
		if late.Load() != 0 {
			t.Fatalf("%d calls after close", late.Load())
		}
		if r.Len() != 0 || r.Bytes() != 0 {
			t.Fatalf("closed, holds %d", r.Len())
		}
	}
	eventually(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}
