package affinity

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// TestStormOnFewSessions has 64 clients at once in each of 100 sessions. Each client wants
// another target. All of a session agree on one, and nobody fails.
func TestStormOnFewSessions(t *testing.T) {
	const keys, clients, turns = 100, 64, 5
	r := open(t, Options{})
	s := NewSessions(r)
	var binds, moved atomic.Int64
	var homes [keys]atomic.Uint64
	each(keys*clients, func(i int) {
		key := numberedKey(i % keys)
		for range turns {
			var u Use
			s.Begin(&u, key)
			b, _, err := u.Find(background, time.Minute)
			if err == nil && b.Version == 0 {
				u.Choose(on(uint64(i))) //nolint:gosec // not negative
				runtime.Gosched()
				var won bool
				if b, won, err = u.Bind(background, 0, want(on(uint64(i)), time.Hour, EngineBacked)); won { //nolint:gosec // not negative
					binds.Add(1)
				}
			}
			if home := &homes[i%keys]; !home.CompareAndSwap(0, uint64(b.Version)) && home.Load() != uint64(b.Version) {
				moved.Add(1)
			}
			if end := u.End(background, b.Version); err != nil || end != nil || b.Version == 0 {
				t.Errorf("bound to %+v, %v, %v", b, err, end)
			}
		}
	})
	if binds.Load() != keys || moved.Load() != 0 || s.Len() != keys || s.Live() != 0 {
		t.Errorf("%d keys: %d binds, %d turns elsewhere, %d bindings, %d live", keys, binds.Load(), moved.Load(), s.Len(), s.Live())
	}
}
