package affinity

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// inStripe returns a key of the first stripe and the first place.
func inStripe(n int) (k Key) {
	binary.LittleEndian.PutUint64(k[:8], uint64(n+1)<<20) //nolint:gosec // not negative
	return k
}

// TestFreshBindingsAreFound binds sessions of one stripe, without the table of recent entries
// that would find them first. Others look them up while the stripe settles again and again.
func TestFreshBindingsAreFound(t *testing.T) {
	const n = 20_000
	r := open(t, Options{})
	var bound atomic.Int64
	var done atomic.Bool
	go func() {
		defer done.Store(true)
		for i := range n {
			if _, ok, err := r.Bind(background, inStripe(i), 0, want(on(1), time.Hour, RouterOnly)); !ok || err != nil {
				t.Error(ok, err)
			}
			bound.Store(int64(i) + 1)
			if i%100 == 99 { // the earlier ones of a hash's changes must not undo the later
				b, _, _ := r.Peek(background, inStripe(i))
				r.Unbind(background, inStripe(i), b.Version)
				r.Bind(background, inStripe(i), 0, want(on(2), time.Hour, RouterOnly))
			}
		}
	}()
	each(2, func(int) {
		for !done.Load() {
			last := int(bound.Load())
			for i := last - 1; i >= max(0, last-3*maxFresh); i-- {
				key := inStripe(i)
				if i%100 != 99 && r.find(&key) == nil {
					t.Errorf("session %d of %d is not found", i, last)
					return
				}
			}
			runtime.Gosched()
		}
	})
	for i := range n {
		key := inStripe(i)
		if e := r.find(&key); e == nil || i%100 == 99 && e.worker != 2 {
			t.Fatalf("session %d: %+v", i, e)
		}
	}
	s := r.stripe(0)
	s.Lock()
	r.settle(s)
	s.Unlock()
	cacheHolds(t, r)
}

// TestRecentEntriesMayBeLost binds more sessions than the table of recent entries can hold,
// at one place and everywhere. Reads still find all.
func TestRecentEntriesMayBeLost(t *testing.T) {
	r := open(t, Options{Sweep: time.Hour})
	var keys []Key
	for i := range 5 * minPlaces {
		keys = append(keys, inStripe(i), numberedKey(i))
	}
	for i, k := range keys {
		r.Bind(background, k, 0, want(on(uint64(i)), time.Hour, RouterOnly)) //nolint:gosec // not negative
	}
	check := func() {
		t.Helper()
		for range 2 * len(keys) {
			i := rand.IntN(len(keys))
			if b, ok, _ := r.Get(background, keys[i]); !ok || b.Target != on(uint64(i)) { //nolint:gosec // not negative
				t.Fatalf("session %d: %+v, %v", i, b, ok)
			}
		}
	}
	check()
	if r.sweep(); len(*r.recent.places.Load()) < len(keys) {
		t.Errorf("%d places for %d sessions", len(*r.recent.places.Load()), len(keys))
	}
	check()
	for i, k := range keys[:len(keys)-10] {
		b, _, _ := r.Peek(background, k)
		r.Unbind(background, k, b.Version)
		if _, ok, _ := r.Get(background, k); ok {
			t.Fatalf("session %d is found after its end", i)
		}
	}
	if r.sweep(); len(*r.recent.places.Load()) != minPlaces {
		t.Errorf("%d places for 10 sessions", len(*r.recent.places.Load()))
	}
}
