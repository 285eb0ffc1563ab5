package affinity

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
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

// TestFloodOfSessions binds ten times as many sessions as the store holds, from several
// clients at once. None fails, the memory stays bounded, and sessions in use stay.
func TestFloodOfSessions(t *testing.T) {
	bound := 100_000
	if testing.Short() {
		bound = 5_000
	}
	const clients, used = 8, 100
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc) //nolint:gosec // memory ends before
	}
	before := heap()
	r := open(t, Options{MaxSessions: bound, Sweep: DefaultSweep})
	s := NewSessions(r)
	bind := func(u *Use, n int) (Binding, bool, error) {
		s.Begin(u, numberedKey(n))
		return u.Bind(background, 0, want(kvscore.Target{Worker: 1}, time.Hour, RouterOnly))
	}
	var live [used]Use
	for i := range live {
		if _, ok, err := bind(&live[i], i); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	var failures, over atomic.Int64
	began := time.Now()
	each(clients, func(client int) {
		for n := used + client; n < 10*bound; n += clients {
			var u Use
			b, ok, err := bind(&u, n)
			if !ok || err != nil || u.End(background, b.Version) != nil {
				failures.Add(1)
			}
			over.Store(max(over.Load(), int64(r.Len())))
		}
	})
	took := time.Since(began)
	memory := (heap() - before) / int64(bound)
	t.Logf("%d sessions through a bound of %d: %v each, %d failures, at most %d bindings, %d bytes each", 10*bound, bound,
		took/time.Duration(10*bound), failures.Load(), over.Load(), memory)
	if failures.Load() != 0 || over.Load() != int64(bound) || r.Len() != bound {
		t.Errorf("%d failures, at most %d bindings, %d at the end", failures.Load(), over.Load(), r.Len())
	}
	if memory > 400 && !raceEnabled && !testing.Short() { // deletions make Go's maps grow beyond what they hold
		t.Errorf("a binding takes %d bytes", memory)
	}
	for i := range live {
		if b, _, err := live[i].Find(background, 0); b.Version == 0 || err != nil || live[i].End(background, b.Version) != nil {
			t.Errorf("session %d, which is in use: %+v, %v", i, b, err)
		}
	}
}
