package affinity

import (
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

// ended is one call of OnExpire.
type ended struct {
	session string
	version uint64
	why     Reason
}

// ends records the calls of OnExpire.
type ends struct {
	mu   sync.Mutex
	all  []ended
	full []Binding
}

func (l *ends) record(session string, b Binding, why Reason) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, ended{session, b.Version, why})
	l.full = append(l.full, b)
}

func (l *ends) take() []ended {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.all
	l.all, l.full = nil, nil
	return all
}

// open returns a store which is closed with the test. It sweeps when the test
// says so.
func open(t testing.TB, o Options) *Ristretto {
	t.Helper()
	if o.Sweep == 0 {
		o.Sweep = time.Hour
	}
	r, err := NewRistretto(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func on(worker uint64) kvscore.Target { return kvscore.Target{Worker: worker, Rank: 1} }

func mustPut(t testing.TB, r *Ristretto, session string, worker uint64, ttl time.Duration, kind Kind) Binding {
	t.Helper()
	b, err := r.Put(session, on(worker), ttl, kind)
	if err != nil {
		t.Fatalf("putting %q: %v", session, err)
	}
	return b
}

// remove ends the session's binding, if it has the version last seen: a binding
// that has expired has one, too.
func remove(r *Ristretto, session string) (Binding, bool) {
	version := uint64(1)
	if e := r.find(r.hash(session), session); e != nil {
		e.mu.Lock()
		version = e.version
		e.mu.Unlock()
	}
	return r.Remove(session, version)
}

// eventually polls until ok, or fails the test.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// settled waits until every end has been delivered, and checks that the places
// claimed in the queue are exactly those of the live bindings.
func settled(t testing.TB, r *Ristretto) {
	t.Helper()
	live, bytes := 0, int64(0)
	for _, e := range r.List("", 1<<30) {
		if e.Kind == EngineBacked {
			live++
			bytes += entryOverhead + int64(len(e.Session))
		}
	}
	eventually(t, "claims equal live engine-backed bindings", func() bool {
		r.queue.mu.Lock()
		defer r.queue.mu.Unlock()
		return r.queue.claimed == live && r.queue.bytes == bytes
	})
}
