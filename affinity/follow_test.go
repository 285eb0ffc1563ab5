package affinity

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// recorder is what a store tells others, in order.
type recorder struct{ list []func(*Bindings) }

func (o *recorder) Bound(key Key, want Want, v Version) {
	o.list = append(o.list, func(r *Bindings) { r.Follow(&Saved{Key: key, Want: want, Version: v}) })
}

func (o *recorder) Used(key Key) {
	o.list = append(o.list, func(r *Bindings) { r.FollowUse(key) })
}

func (o *recorder) Unbound(key Key, v Version) {
	o.list = append(o.list, func(r *Bindings) { r.FollowEnd(key, v) })
}

// TestStoresAgree has three stores bind, use and unbind a few sessions, and hear of each other late.
// In the end all have the same bindings.
func TestStoresAgree(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // to be repeated
		var stores [3]*Bindings
		var tells [3]recorder
		var heard [3][3]int // by the store, and by the one that told
		for i := range stores {
			r, err := NewBindings(Options{Journal: &tells[i], Clock: func() time.Time { return time.Unix(1e9, 0) }})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			stores[i] = r
		}
		hear := func(i, from, most int) {
			for ; most > 0 && heard[i][from] < len(tells[from].list); most-- {
				tells[from].list[heard[i][from]](stores[i])
				heard[i][from]++
			}
		}
		for range 500 {
			i, key := rng.IntN(3), Key{byte(rng.IntN(4))}
			var err error
			b, _ := stores[i].Peek(key)
			switch rng.IntN(5) {
			case 0:
				stores[i].Unbind(key, b.Version)
			case 1:
				stores[i].Touch(key, b.Version)
			default:
				_, _, err = stores[i].Bind(key, b.Version, Want{Target: kvscore.Target{Worker: rng.Uint64N(9)}, TTL: time.Hour})
			}
			if err != nil {
				t.Fatal(err)
			}
			hear(rng.IntN(3), (i+1)%3, rng.IntN(20))
			hear((i+1)%3, i, rng.IntN(20))
		}
		for _, key := range []Key{{0}, {1}, {2}, {3}} { // the last word, which is the latest
			for i := range stores {
				for from := range stores {
					if from != i {
						hear(i, from, 1000)
					}
				}
			}
			b, _ := stores[0].Peek(key)
			if _, ok, err := stores[0].Bind(key, b.Version, Want{Target: kvscore.Target{Worker: 77}, TTL: time.Hour}); !ok || err != nil {
				t.Fatal(ok, err)
			}
		}
		for i := 1; i < 3; i++ {
			hear(i, 0, 1000)
			for _, key := range []Key{{0}, {1}, {2}, {3}} {
				a, _ := stores[0].Peek(key)
				b, _ := stores[i].Peek(key)
				if a.Target != b.Target || a.Version != b.Version {
					t.Errorf("seed %d: %v and %v", seed, a, b)
				}
			}
		}
	}
}

// TestFollowedSessionsOfEngines follows another router's binding of an engine's session. One that does
// not know the engine's session does not replace it, and nothing reports an end: the other router does.
func TestFollowedSessionsOfEngines(t *testing.T) {
	r, err := NewBindings(Options{OnExpire: func(_ Key, b Binding, why Reason) { t.Errorf("%v of %+v", why, b) }})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	first := r.Changes()
	target := func(n uint64) kvscore.Target { return kvscore.Target{Worker: n} }
	follow := func(kind Kind, session string, at uint64, v Version) bool {
		return r.Follow(&Saved{Key: Key{1}, Version: first + v, Want: Want{Kind: kind, EngineSession: session, Target: target(at), TTL: time.Hour}})
	}
	for _, c := range []struct {
		kind    Kind
		session string
		at      uint64
		version Version
		follows bool
	}{
		{RouterOnly, "", 1, 10, true},
		{EngineBacked, "s", 2, 11, true},
		{RouterOnly, "", 3, 12, false},
		{EngineBacked, "", 2, 13, false}, // it has expired there
		{EngineBacked, "s", 4, 14, true},
		{EngineBacked, "s", 5, 13, false},
		{EngineBacked, "s", 5, math.MaxInt64 - first - 1, false}, // a version that cannot be right
	} {
		if got := follow(c.kind, c.session, c.at, c.version); got != c.follows {
			t.Errorf("%+v: %v", c, got)
		}
	}
	if b, _ := r.Peek(Key{1}); b.Target != target(4) || b.EngineSession != "s" {
		t.Errorf("%+v", b)
	}
	if r.Skip(math.MaxInt64 - 1); r.Changes() > first+1000 {
		t.Error("the versions of further bindings cannot be right")
	}
	r.Reported()
}
