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
			b, ok, err := bind(r, s, 0, on(uint64(i)), time.Minute, RouterOnly)
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
			b, _ := get(r, "s")
			for ok := false; !ok; {
				b, ok, _ = bind(r, "s", b.Version, on(b.Target.Worker+1), time.Hour, RouterOnly)
			}
		}
	})
	if b, _ := peek(r, "s"); b.Target.Worker != goroutines*increments {
		t.Fatalf("counted %d of %d", b.Target.Worker, goroutines*increments)
	}
}

// A binding does not end before the time that a caller got for it: renewal and expiry are ordered. The clock jumps so that deadlines
// are hit while sessions are being renewed and swept.
func TestRenewalRacesExpiry(t *testing.T) {
	var c fakeClock
	var l ends
	var early, expiries atomic.Int64
	r := open(t, Options{Clock: c.now, OnExpire: func(k Key, b Binding, why Reason) {
		if b.Expires.After(c.now()) {
			early.Add(1)
		}
		l.record(k, b, why)
		expiries.Add(1)
	}})
	const sessions, ttl = 16, 100
	deadline := time.Now().Add(10 * time.Second)
	granted := make([]map[Version]time.Time, 4)
	var stop atomic.Bool
	var sweeps sync.WaitGroup
	sweeps.Go(func() {
		for !stop.Load() {
			c.advance(time.Duration(1 + rand.Int64N(ttl)))
			r.sweep()
			runtime.Gosched()
		}
	})
	each(len(granted), func(i int) {
		mine := map[Version]time.Time{}
		for n := 0; n < 15_000 || expiries.Load() < 300 && time.Now().Before(deadline); n++ {
			s := fmt.Sprint("s", rand.IntN(sessions))
			b, ok := get(r, s)
			if !ok {
				b, _, _ = bind(r, s, 0, on(1), ttl, EngineBacked)
			}
			if b.Expires.After(mine[b.Version]) {
				mine[b.Version] = b.Expires
			}
		}
		granted[i] = mine
	})
	stop.Store(true)
	sweeps.Wait()
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
	key := named("s")
	e := r.find(&key)
	used := e.used.Load()
	c.advance(99)
	get(r, "s")
	if r.expire(e, 100) {
		t.Error("expired although renewed")
	}
	if r.evict(e, used, 100, polite) {
		t.Error("evicted although just used")
	}
	if _, ok := get(r, "s"); !ok {
		t.Error("gone")
	}
	if !r.evict(e, used, 100, urgent) || r.evict(e, used, 100, force) || r.expire(e, 1000) {
		t.Error("not ended exactly once")
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
			t.Errorf("the cache still holds %s, which has ended", e.key)
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
			b, err := put(r, s, on(uint64(n)), time.Hour, RouterOnly)
			if err != nil {
				t.Error(err)
				return
			}
			if got, ok := get(r, s); !ok || got.Version != b.Version {
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
		if got, ok := get(r, s); !ok || got.Version != b.Version {
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
		r, err := NewRistretto(Options{MaxSessions: 50, Sweep: time.Millisecond, OnExpire: func(Key, Binding, Reason) {
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
					_, err := put(r, s, on(rnd.Uint64()), time.Millisecond, EngineBacked)
					if errors.Is(err, ErrClosed) && n > 20 {
						break
					}
					get(r, s)
					peek(r, s)
					r.List(background, Key{}, 3)
					remove(r, fmt.Sprint(rnd.IntN(200)))
					if i == 0 {
						r.SetMaxSessions(20 + n%60)
					}
				}
				if _, ok := get(r, "1"); ok {
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
