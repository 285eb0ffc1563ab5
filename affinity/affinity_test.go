package affinity

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"
)

func TestCollidingSessionsDoNotShareABinding(t *testing.T) {
	r := open(t, Options{})
	a, b := Key{15: 1}, Key{15: 2} // their first halves are what ristretto finds them by
	bound, _, _ := r.Bind(a, 0, want(on(1), time.Minute, EngineBacked))
	if _, ok := r.Peek(b); ok {
		t.Fatal("b reads a's binding")
	}
	if _, ok := r.Unbind(b, bound.Version); ok {
		t.Fatal("b removes a's binding")
	}
	if _, ok, err := r.Bind(b, 0, want(on(2), time.Minute, EngineBacked)); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if got, ok := r.Peek(b); !ok || got.Target != on(2) {
		t.Fatalf("b = %+v, %v", got, ok)
	}
	if _, ok := r.Peek(a); ok {
		t.Fatal("a reads b's binding")
	}
}

func TestTimeToLive(t *testing.T) {
	r := open(t, Options{})
	for _, ttl := range []time.Duration{0, -1, math.MinInt64} {
		if _, ok := get(r, "s"); ok {
			t.Error("one that has ended is found")
		}
		if _, ok, err := bind(r, "s", 0, on(1), ttl, RouterOnly); !ok || err != nil {
			t.Errorf("bound for %v: %v, %v", ttl, ok, err)
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
		"get":    func(k Key) (Binding, bool) { return r.Peek(k) },
		"touch":  func(k Key) (Binding, bool) { return r.Touch(k, b.Version) },
		"unbind": func(k Key) (Binding, bool) { return r.Unbind(k, b.Version) },
	} {
		if got, ok := do(named("s")); ok || got != (Binding{}) {
			t.Errorf("%s: %+v, %v", name, got, ok)
		}
	}
	if _, ok, err := r.Bind(named("s"), 0, b.Want); ok || !errors.Is(err, ErrFull) {
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

// TestHashesTellSessionsApart hashes what differs in one part only, or where one part ends
// and the next begins.
func TestHashesTellSessionsApart(t *testing.T) {
	s, other := NewSecret(), NewSecret()
	id := s.Identity("k")
	session := s.Session(id, Tenant{}, "")
	seen := make(map[[16]byte]string)
	for name, h := range map[string][16]byte{
		"identity":               id,
		"identity of no key":     s.Identity(""),
		"identity, other secret": other.Identity("k"),
		"session":                session,
		"session of a tenant":    s.Session(id, Tenant{"ab", ""}, ""),
		"tenant in other part":   s.Session(id, Tenant{"", "ab"}, ""),
		"tenant in two parts":    s.Session(id, Tenant{"a", "b"}, ""),
		"long tenant":            s.Session(id, Tenant{strings.Repeat("x", 9000), ""}, ""),
		"longer tenant":          s.Session(id, Tenant{strings.Repeat("x", 9001), ""}, ""),
		"model":                  s.Session(id, Tenant{}, "m"),
		"other model":            s.Session(id, Tenant{}, "n"),
		"salt and model":         s.Session(id, Tenant{"", "m"}, "m"),
		"hash as a key":          s.Identity(string(session[:])),
	} {
		if with, ok := seen[h]; ok {
			t.Errorf("%s and %s have one hash", name, with)
		}
		seen[h] = name
	}
	if s.Identity("k") != id || s.Session(id, Tenant{}, "") != session {
		t.Error("the same input has another hash")
	}
}

// TestScopesOfTenants has tenants that differ in one part only.
func TestScopesOfTenants(t *testing.T) {
	s, other := NewSecret(), NewSecret()
	seen := make(map[uint32]Tenant)
	for _, of := range []Tenant{{}, {"a", ""}, {"", "a"}, {"a", "b"}, {"ab", ""}} {
		scope := s.Scope(of)
		if with, ok := seen[scope]; ok {
			t.Errorf("%q and %q have one scope", of, with)
		}
		if none := of == (Tenant{}); (scope == 0) != none || !none && scope == other.Scope(of) {
			t.Errorf("%q has the scope %d", of, scope)
		}
		seen[scope] = of
	}
}

// TestHashesDoNotAllocate hashes keys and tenants of usual length.
func TestHashesDoNotAllocate(t *testing.T) {
	s, key, of := NewSecret(), strings.Repeat("k", 200), Tenant{strings.Repeat("t", 100), strings.Repeat("s", 100)}
	if n := testing.AllocsPerRun(100, func() {
		s.Session(s.Identity(key), of, key)
		s.Scope(of)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestOneScopeTakesItsShare floods the store from one scope: that evicts its own bindings,
// those that have been idle longest, and no others.
func TestOneScopeTakesItsShare(t *testing.T) {
	var c fakeClock
	r := open(t, Options{Clock: c.now, MaxSessions: 1000})
	keys := numbered(6000)
	add := func(n int, scope uint32) {
		t.Helper()
		for _, k := range keys[:n] {
			c.advance(1)
			if _, ok, err := r.Bind(k, 0, Want{Target: on(1), TTL: time.Hour, Scope: scope}); !ok || err != nil {
				t.Fatal(ok, err)
			}
		}
		keys = keys[n:]
	}
	held := func(scope uint32, n int) {
		t.Helper()
		got := 0
		for _, e := range all(r) {
			if e.Scope == scope {
				got++
			}
		}
		if got != n || r.roster.counts[scope] != n {
			t.Fatalf("scope %d holds %d, counts %d, want %d", scope, got, r.roster.counts[scope], n)
		}
	}
	unbind := func() {
		t.Helper()
		for _, e := range all(r) {
			if _, ok := r.Unbind(e.Key, e.Version); !ok {
				t.Fatal("not unbound")
			}
		}
		if len(r.roster.counts) != 0 {
			t.Errorf("counts scopes without bindings: %v", r.roster.counts)
		}
	}
	add(2000, 0) // scope 0 may take what the others leave
	held(0, 1000)
	unbind()
	add(100, 1)
	add(2000, 2)
	held(1, 100)
	held(2, 500)
	add(400, 0)
	held(1, 100)
	add(100, 1) // below its share: the longest idle make room, of any scope
	if r.Len() != 1000 {
		t.Fatalf("holds %d", r.Len())
	}
	r.SetMaxSessions(100)
	add(100, 1) // a scope above its lowered share comes down with what it adds
	add(100, 2)
	if n := r.roster.counts; n[1] > 50 || n[2] > 50 || r.Len() != n[0]+n[1]+n[2] || r.Len() > 100 {
		t.Fatalf("lowered, holds %d: %v", r.Len(), n)
	}
	unbind()
}

// TestBindingsInUseAreSpared fills a store with bindings that requests use. Another session is
// refused until one of them is free. The operator's limit counts all the same.
func TestBindingsInUseAreSpared(t *testing.T) {
	var c fakeClock
	r := open(t, Options{Clock: c.now, MaxSessions: 200})
	keys := numbered(201)
	uses := make([]Use, 200)
	for i := range uses {
		bindUse(t, r, &uses[i], keys[i])
	}
	c.advance(1)
	if _, _, err := r.Bind(keys[200], 0, want(on(2), time.Hour, RouterOnly)); err != ErrFull {
		t.Errorf("all are in use: %v", err)
	}
	for i := range 20 {
		uses[i].End(0)
	}
	c.advance(1)
	if _, ok, err := r.Bind(keys[200], 0, want(on(2), time.Hour, RouterOnly)); !ok || err != nil {
		t.Errorf("some are free: %v, %v", ok, err)
	}
	for i := 20; i < len(uses); i++ {
		if _, ok := r.Peek(keys[i]); !ok {
			t.Error("one that is in use was evicted")
		}
	}
	if r.SetMaxSessions(10); r.Len() != 10 {
		t.Errorf("the operator's limit is 10, holds %d", r.Len())
	}
}
