package affinity

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"
)

func TestCollidingSessionsDoNotShareABinding(t *testing.T) {
	var l ends
	r := open(t, Options{OnExpire: l.record})
	a, b := Key{15: 1}, Key{15: 2} // their first halves are what ristretto finds them by
	bound, _, _ := r.Bind(background, a, 0, want(on(1), time.Minute, EngineBacked))
	if _, ok := r.Get(b); ok {
		t.Fatal("b reads a's binding")
	}
	if _, ok := r.Unbind(b, bound.Version); ok {
		t.Fatal("b removes a's binding")
	}
	if _, ok, err := r.Bind(background, b, 0, want(on(2), time.Minute, EngineBacked)); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if got, ok := r.Get(b); !ok || got.Target != on(2) {
		t.Fatalf("b = %+v, %v", got, ok)
	}
	if _, ok := r.Get(a); ok {
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

// TestVersionsNeverRecur restarts a store a nanosecond after it has made many versions, and a day
// before it: then the owner skips those that were used.
func TestVersionsNeverRecur(t *testing.T) {
	c := new(fakeClock)
	var last Version
	for run := range 4 {
		if run == 3 {
			c.advance(-24 * time.Hour)
		}
		r := open(t, Options{Clock: c.now})
		if run == 3 {
			r.Skip(last)
			r.Skip(1)
		}
		for range 100 {
			c.advance(10) // far fewer Binds than nanoseconds
			b := mustPut(t, r, "s", 1, time.Hour, RouterOnly)
			if b.Version <= last || r.Changes() != b.Version {
				t.Fatalf("version %d after %d", b.Version, last)
			}
			last = b.Version
		}
		r.Close()
	}
}

func TestClosedStoreIsEmpty(t *testing.T) {
	var l ends
	r := open(t, Options{OnExpire: l.record})
	b := mustPut(t, r, "s", 1, time.Minute, EngineBacked)
	r.Close()
	for name, do := range map[string]func(Key) (Binding, bool){
		"get":    func(k Key) (Binding, bool) { return r.Get(k) },
		"touch":  func(k Key) (Binding, bool) { return r.Touch(k, b.Version) },
		"unbind": func(k Key) (Binding, bool) { return r.Unbind(k, b.Version) },
	} {
		if got, ok := do(named("s")); ok || got != (Binding{}) {
			t.Errorf("%s: %+v, %v", name, got, ok)
		}
	}
	if _, ok, err := r.Bind(background, named("s"), 0, b.Want); ok || !errors.Is(err, ErrFull) {
		t.Errorf("bound %v, %v", ok, err)
	}
	if page := r.List(Key{}, 10); len(page) != 0 {
		t.Errorf("listed %v", page)
	}
	r.SetMaxSessions(1)
	r.sweep()
	if got := l.take(); len(got) != 0 || r.Bytes() != 0 {
		t.Errorf("reported %v, holds %d bytes", got, r.Bytes())
	}
}
