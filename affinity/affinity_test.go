package affinity

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"
)

func TestEndsAreReported(t *testing.T) {
	const ttl = time.Minute
	tests := []struct {
		name string
		do   func(r *Ristretto, c *fakeClock)
		want []Reason
	}{
		{"expired, seen by get", func(r *Ristretto, c *fakeClock) { c.advance(ttl); get(r, "s") }, []Reason{Expired}},
		{"expired, seen by peek", func(r *Ristretto, c *fakeClock) { c.advance(ttl); peek(r, "s") }, []Reason{Expired}},
		{"expired, seen by remove", func(r *Ristretto, c *fakeClock) { c.advance(ttl); remove(r, "s") }, []Reason{Expired}},
		{"expired, seen by sweep", func(r *Ristretto, c *fakeClock) { c.advance(ttl); r.sweep() }, []Reason{Expired}},
		{"expired, seen by bind", func(r *Ristretto, c *fakeClock) { c.advance(ttl); bind(r, "s", 0, on(2), ttl, RouterOnly) }, []Reason{Expired}},
		{"evicted", func(r *Ristretto, c *fakeClock) { c.advance(1); put(r, "other", on(2), ttl, RouterOnly) }, []Reason{Evicted}},
		{"moved", func(r *Ristretto, _ *fakeClock) { put(r, "s", on(2), ttl, RouterOnly) }, []Reason{Replaced}},
		{"moved twice", func(r *Ristretto, _ *fakeClock) {
			put(r, "s", on(2), ttl, EngineBacked)
			put(r, "s", on(3), ttl, EngineBacked)
		}, []Reason{Replaced, Replaced}},
		{"moved by a swap", func(r *Ristretto, _ *fakeClock) {
			b, _ := peek(r, "s")
			bind(r, "s", b.Version, on(2), ttl, EngineBacked)
		}, []Reason{Replaced}},
		{"lost swap", func(r *Ristretto, _ *fakeClock) { bind(r, "s", 0, on(2), ttl, EngineBacked) }, nil},
		{"renewed", func(r *Ristretto, _ *fakeClock) { put(r, "s", on(1), ttl, EngineBacked) }, nil},
		{"renewed, downgraded, moved", func(r *Ristretto, _ *fakeClock) {
			put(r, "s", on(1), ttl, RouterOnly)
			put(r, "s", on(2), ttl, RouterOnly)
		}, nil},
		{"upgraded, moved", func(r *Ristretto, _ *fakeClock) {
			put(r, "s", on(1), ttl, RouterOnly)
			put(r, "s", on(1), ttl, EngineBacked)
			put(r, "s", on(2), ttl, RouterOnly)
		}, []Reason{Replaced}},
		{"removed", func(r *Ristretto, _ *fakeClock) { remove(r, "s") }, nil},
		{"not removed", func(r *Ristretto, _ *fakeClock) {
			r.Unbind(background, named("s"), 0)
			put(r, "s", on(2), ttl, RouterOnly)
		}, []Reason{Replaced}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var c fakeClock
			var l ends
			r := open(t, Options{Clock: c.now, OnExpire: l.record, MaxSessions: 1})
			mustPut(t, r, "s", 1, ttl, EngineBacked)
			tt.do(r, &c)
			settled(t, r)
			cacheHolds(t, r)
			got := l.take()
			if len(got) != len(tt.want) {
				t.Fatalf("reported %v, want %v", got, tt.want)
			}
			for i, g := range got {
				if g.key != named("s") || g.why != tt.want[i] || g.version == 0 {
					t.Fatalf("reported %v, want %v", got, tt.want)
				}
			}
		})
	}
}

func TestCollidingSessionsDoNotShareABinding(t *testing.T) {
	var l ends
	r := open(t, Options{OnExpire: l.record})
	a, b := Key{15: 1}, Key{15: 2} // their first halves are what ristretto finds them by
	bound, _, _ := r.Bind(background, a, 0, want(on(1), time.Minute, EngineBacked))
	if _, ok, _ := r.Get(background, b); ok {
		t.Fatal("b reads a's binding")
	}
	if _, ok, _ := r.Unbind(background, b, bound.Version); ok {
		t.Fatal("b removes a's binding")
	}
	if _, ok, err := r.Bind(background, b, 0, want(on(2), time.Minute, EngineBacked)); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if got, ok, _ := r.Get(background, b); !ok || got.Target != on(2) {
		t.Fatalf("b = %+v, %v", got, ok)
	}
	if _, ok, _ := r.Get(background, a); ok {
		t.Fatal("a reads b's binding")
	}
	settled(t, r)
	if got := l.take(); len(got) != 1 || got[0] != (ended{a, bound.Version, Evicted}) {
		t.Fatalf("reported %v", got)
	}
	if r.Len() != 1 {
		t.Fatalf("holds %d", r.Len())
	}
}

func TestTimeToLive(t *testing.T) {
	r := open(t, Options{})
	for _, ttl := range []time.Duration{0, -1, math.MinInt64} {
		if _, err := put(r, "s", on(1), ttl, RouterOnly); !errors.Is(err, ErrTTL) {
			t.Errorf("put for %v: %v", ttl, err)
		}
		if _, ok, err := bind(r, "s", 0, on(1), ttl, RouterOnly); ok || !errors.Is(err, ErrTTL) {
			t.Errorf("swap for %v: %v", ttl, err)
		}
	}
	if b := mustPut(t, r, "s", 1, math.MaxInt64, RouterOnly); b.TTL != maxTTL {
		t.Errorf("the longest life is %v", b.TTL)
	}
	if _, ok := get(r, "s"); !ok {
		t.Error("the longest life is over at once")
	}
}

func TestKeysAsText(t *testing.T) {
	k := named("s")
	if got, ok := ParseKey(k.String()); !ok || got != k {
		t.Errorf("%s is read as %s, %v", k, got, ok)
	}
	for _, s := range []string{"", "00", strings.Repeat("0", 31), strings.Repeat("0", 33), strings.Repeat("A", 32), strings.Repeat("g", 32)} {
		if _, ok := ParseKey(s); ok {
			t.Errorf("%q is a key", s)
		}
	}
}

// TestVersionsNeverRecur restarts a store a nanosecond after it has made many versions.
func TestVersionsNeverRecur(t *testing.T) {
	c := &fakeClock{}
	var last Version
	for range 3 {
		r := open(t, Options{Clock: c.now})
		for range 100 {
			c.advance(10) // far fewer Binds than nanoseconds
			if b := mustPut(t, r, "s", 1, time.Hour, RouterOnly); b.Version <= last {
				t.Fatalf("version %d after %d", b.Version, last)
			} else {
				last = b.Version
			}
		}
		r.Close()
	}
}
