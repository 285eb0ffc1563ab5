package affinity

import (
	"crypto/sha256"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// fakeClock starts at a fixed date and moves only by calls.
type fakeClock struct{ ns atomic.Int64 }

var epoch = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func (c *fakeClock) now() time.Time          { return epoch.Add(time.Duration(c.ns.Load())) }
func (c *fakeClock) advance(d time.Duration) { c.ns.Add(int64(d)) }

// reported is one call of OnExpire.
type reported struct {
	key     Key
	version Version
	why     Reason
}

// ends records the calls of OnExpire.
type ends struct {
	mu  sync.Mutex
	all []reported
}

func (l *ends) record(key Key, b Binding, why Reason) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, reported{key, b.Version, why})
}

func (l *ends) take() []reported {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.all
	l.all = nil
	return all
}

// open returns a store which is closed with the test. It sweeps when the test
// says so.
func open(t testing.TB, o Options) *Bindings {
	t.Helper()
	if o.Sweep == 0 {
		o.Sweep = time.Hour
	}
	r, err := NewBindings(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func on(worker uint64) kvscore.Target { return kvscore.Target{Worker: worker, Rank: 1} }

// named returns a key for a test's session.
func named(session string) (k Key) {
	sum := sha256.Sum256([]byte(session))
	copy(k[:], sum[:])
	return k
}

func want(t kvscore.Target, ttl time.Duration, kind Kind) Want {
	return Want{Target: t, TTL: ttl, Kind: kind}
}

func get(r *Bindings, session string) (Binding, bool) {
	r.FollowUse(named(session))
	return peek(r, session)
}

func peek(r *Bindings, session string) (Binding, bool) {
	return r.Peek(named(session))
}

func bind(r *Bindings, session string, expect Version, t kvscore.Target, ttl time.Duration, kind Kind) (Binding, bool, error) {
	return r.Bind(named(session), expect, want(t, ttl, kind))
}

// put binds the session whatever it is bound to.
func put(r *Bindings, session string, t kvscore.Target, ttl time.Duration, kind Kind) (Binding, error) {
	b, _ := peek(r, session)
	for {
		next, ok, err := bind(r, session, b.Version, t, ttl, kind)
		if ok || err != nil {
			return next, err
		}
		b = next
	}
}

func mustPut(t testing.TB, r *Bindings, session string, worker uint64, ttl time.Duration, kind Kind) Binding {
	t.Helper()
	b, err := put(r, session, on(worker), ttl, kind)
	if err != nil {
		t.Fatalf("binding %q: %v", session, err)
	}
	return b
}

// remove ends the session's binding, if it has the version last seen: a binding
// that has expired has one, too.
func remove(r *Bindings, session string) (Binding, bool) {
	version, key := Version(1), named(session)
	r.mu.Lock()
	if e, _ := r.cache.Get(key.hash()); e != nil && e.key == key {
		version = e.version
	}
	r.mu.Unlock()
	return r.Unbind(key, version)
}

// all returns every live binding.
func all(r *Bindings) []Entry {
	return r.List(Key{}, 1<<30)
}

// eventually polls until ok, or fails the test.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// Live returns the number of sessions with live requests.
func (s *Bindings) Live() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.active)
}
