package affinity

import (
	"encoding/binary"
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
