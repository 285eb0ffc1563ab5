package affinity

import (
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"
)

// ledger is the model of a store under concurrent use. It records how each version ends.
// Versions grow by one from the first, so they index arrays.
type ledger struct {
	t     *testing.T
	first Version
	most  int            // bindings at a time; the operator lowers that now and then
	clock atomic.Int64   // counts operations, to order them
	ended []atomic.Int64 // when the call that ended a version returned; 0 if none did
	fates []atomic.Int32 // bits of how
	kinds []atomic.Int32 // 1 + Kind, once accepted
}

// Fates of a version. Each version has exactly one. The caller that replaces a version sees
// replaced, too.
const (
	renewed  = 1 << iota // by a Bind to the same target
	replaced             // by a Bind to another target
	unbound
	reportedExpired
	reportedEvicted
	reportedReplaced
	listed // still there at the end
)

func (l *ledger) at(v Version) int {
	i := int(v - l.first)
	if i <= 0 || i >= len(l.fates) {
		l.t.Errorf("version %d is none of the store's", v)
		return 0
	}
	return i
}

// fate records what became of a version.
func (l *ledger) fate(v Version, how int32) {
	i := l.at(v)
	if old := l.fates[i].Or(how); old&how != 0 {
		l.t.Errorf("version %d: fate %b twice", v, how)
	}
	if how <= unbound {
		l.ended[i].Store(l.clock.Add(1))
	}
}

// read checks that a version that a read returned had not ended before the read began.
func (l *ledger) read(v Version, began int64) {
	if end := l.ended[l.at(v)].Load(); end != 0 && end < began {
		l.t.Errorf("version %d was read after it ended", v)
	}
}

// sum checks the fates of all versions after the store is quiet.
func (l *ledger) sum() (counts map[int32]int) {
	counts = make(map[int32]int)
	for i := range l.fates {
		f, kind := l.fates[i].Load(), l.kinds[i].Load()
		if kind == 0 {
			if f != 0 {
				l.t.Errorf("version %d was not accepted: fates %b", i, f)
			}
			continue
		}
		counts[f]++
		engine := Kind(kind-1) == EngineBacked
		switch f {
		case renewed, unbound, listed:
		case replaced, 0: // 0: a silent expiry or eviction
			if engine {
				l.t.Errorf("version %d: engine-backed, fates %b, its end was not reported", i, f)
			}
		case replaced | reportedReplaced, reportedExpired, reportedEvicted:
			if !engine {
				l.t.Errorf("version %d: router-only, fates %b", i, f)
			}
		default:
			l.t.Errorf("version %d: fates %b contradict each other", i, f)
		}
	}
	return counts
}

// TestEachVersionEndsOnce does a million random operations from several goroutines and checks
// each against the ledger. Reads return no version that had ended. A Bind wins only over the
// version that it expects. Each version ends once, and the store reports its end if it must.
func TestEachVersionEndsOnce(t *testing.T) {
	ops := 1_000_000
	if testing.Short() {
		ops = 100_000
	}
	for _, tt := range []struct {
		name     string
		max, ops int
	}{{"with room", 50_000, ops / 2}, {"full", 40, ops / 4}, {"tiny", 2, ops / 4}} {
		t.Run(tt.name, func(t *testing.T) {
			var c fakeClock
			l := &ledger{
				t: t, first: Version(epoch.UnixNano()), most: tt.max, //nolint:gosec // after 1970
				ended: make([]atomic.Int64, tt.ops+1), fates: make([]atomic.Int32, tt.ops+1), kinds: make([]atomic.Int32, tt.ops+1),
			}
			r := open(t, Options{Clock: c.now, MaxSessions: tt.max, OnExpire: func(_ Key, b Binding, why Reason) {
				l.fate(b.Version, map[Reason]int32{Expired: reportedExpired, Evicted: reportedEvicted, Replaced: reportedReplaced}[why])
			}})
			const goroutines = 8
			keys := numbered(200)
			each(goroutines, func(int) {
				rnd := rand.New(rand.NewPCG(rand.Uint64(), 0))
				for range tt.ops / goroutines {
					l.operate(r, &c, keys[rnd.IntN(len(keys))], rnd)
				}
			})
			r.sweep()
			settled(t, r)
			for _, e := range all(r) {
				l.fate(e.Version, listed)
			}
			counts := l.sum()
			t.Logf("fates: %v", counts)
			for _, f := range []int32{renewed, unbound, replaced, replaced | reportedReplaced} {
				if counts[f] == 0 {
					t.Errorf("no version has fate %b", f)
				}
			}
			if tt.max < 100 && counts[reportedEvicted] == 0 || tt.max > 100 && counts[reportedExpired] == 0 {
				t.Error("none expired, or none was evicted")
			}
			cacheHolds(t, r)
		})
	}
}

// operate does one random operation.
func (l *ledger) operate(r *Bindings, c *fakeClock, key Key, rnd *rand.Rand) {
	began := l.clock.Add(1)
	b, ok := r.Peek(key)
	if ok {
		l.read(b.Version, began)
	}
	switch rnd.IntN(8) {
	case 0, 1, 2:
		l.bind(r, key, b, Want{Target: on(rnd.Uint64N(4)), Kind: Kind(rnd.IntN(2)), TTL: 5000}) //nolint:gosec // small
	case 3:
		l.bind(r, key, b, Want{Target: b.Target, Kind: b.Kind, TTL: 5000})
	case 4:
		if gone, ok := r.Unbind(key, b.Version); ok {
			l.fate(gone.Version, unbound)
		}
	case 5:
		c.advance(time.Duration(rnd.IntN(50)))
		if rnd.IntN(50) == 0 {
			r.sweep()
			r.Dump(func([]Saved) bool { return true })
			r.SetMaxSessions(l.most/2 + rnd.IntN(l.most/2+1))
		}
	case 6:
		if got, ok := r.Touch(key, b.Version); ok && got.Version != b.Version {
			l.t.Errorf("touched version %d, got %d", b.Version, got.Version)
		}
	default:
		began := l.clock.Add(1)
		if got, ok := r.Get(key); ok {
			l.read(got.Version, began)
		}
	}
}

func (l *ledger) bind(r *Bindings, key Key, old Binding, w Want) {
	next, ok, err := r.Bind(background, key, old.Version, w)
	if err != nil && !errors.Is(err, ErrFull) {
		l.t.Error(err)
	}
	if !ok {
		return
	}
	if next.Want != w || next.Version <= old.Version {
		l.t.Errorf("bound %+v over version %d, got %+v", w, old.Version, next)
	}
	l.kinds[l.at(next.Version)].Store(1 + int32(w.Kind))
	switch {
	case old.Version == 0:
	case old.Target == w.Target:
		l.fate(old.Version, renewed)
	default:
		l.fate(old.Version, replaced)
	}
}
