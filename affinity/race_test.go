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

// cacheHolds checks that ristretto holds the entries of the roster, and has
// deleted all others.
func cacheHolds(t *testing.T, r *Bindings) {
	t.Helper()
	r.cache.Wait()
	n := 0
	r.cache.IterValues(func(e *entry) bool {
		n++
		if r.roster.slots[e.slot].entry != e {
			t.Errorf("the cache still holds %s, which has ended", e.key)
		}
		return false
	})
	if cost := r.cache.MaxCost() - r.cache.RemainingCost(); n != r.Len() || cost != int64(n) {
		t.Errorf("the cache holds %d entries for %d bindings and accounts for %d", n, r.Len(), cost)
	}
}

func TestCloseInFlight(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 20 {
		var closed atomic.Bool
		var late atomic.Int64
		r, err := NewBindings(Options{MaxSessions: 50, Sweep: time.Millisecond, OnExpire: func(Key, Binding, Reason) {
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
					if errors.Is(err, ErrFull) && closed.Load() && n > 20 {
						break
					}
					get(r, s)
					peek(r, s)
					r.List(Key{}, 3)
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

// TestStormOnFewSessions has 64 clients at once in each of 100 sessions. Each client wants
// another target. All of a session agree on one, and nobody fails.
func TestStormOnFewSessions(t *testing.T) {
	const keys, clients, turns = 100, 64, 5
	r := open(t, Options{})
	var binds, moved atomic.Int64
	var homes [keys]atomic.Uint64
	each(keys*clients, func(i int) {
		key := numberedKey(i % keys)
		for range turns {
			var u Use
			r.Begin(&u, key)
			b, _, err := u.Find(t.Context(), time.Minute)
			if err == nil && b.Version == 0 {
				u.Choose(on(uint64(i))) //nolint:gosec // not negative
				runtime.Gosched()
				var won bool
				if b, won, err = u.Bind(0, want(on(uint64(i)), time.Hour, EngineBacked)); won { //nolint:gosec // not negative
					binds.Add(1)
				}
			}
			if home := &homes[i%keys]; !home.CompareAndSwap(0, uint64(b.Version)) && home.Load() != uint64(b.Version) {
				moved.Add(1)
			}
			if u.End(b.Version); err != nil || b.Version == 0 {
				t.Errorf("bound to %+v, %v", b, err)
			}
		}
	})
	if binds.Load() != keys || moved.Load() != 0 || r.Len() != keys || r.Live() != 0 {
		t.Errorf("%d keys: %d binds, %d turns elsewhere, %d bindings, %d live", keys, binds.Load(), moved.Load(), r.Len(), r.Live())
	}
}
