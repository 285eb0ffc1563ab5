package affinity

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"
)

// dumped returns all that Dump passes on.
func dumped(t testing.TB, r *Ristretto) map[Key]Saved {
	t.Helper()
	all := make(map[Key]Saved)
	if !r.Dump(func(part []Saved) bool {
		for _, s := range part {
			all[s.Key] = s
		}
		return true
	}) {
		t.Fatal("the dump ended early")
	}
	return all
}

// TestRestoredBindingsLiveOn moves bindings of several ages to a new store, with a downtime.
func TestRestoredBindingsLiveOn(t *testing.T) {
	clock := new(fakeClock)
	old := open(t, Options{Clock: clock.now})
	for i := range 5 {
		w := want(on(uint64(i)), time.Minute, Kind(i%2))
		w.Scope = uint32(i)
		if _, ok, err := old.Bind(background, named(fmt.Sprint(i)), 0, w); !ok || err != nil {
			t.Fatal(ok, err)
		}
		clock.advance(10 * time.Second)
	}
	saved := dumped(t, old)
	if len(saved) != 5 {
		t.Fatalf("%d bindings are dumped", len(saved))
	}

	const down = 25 * time.Second
	fresh := open(t, Options{Clock: clock.now})
	for _, s := range saved {
		s.Idle += down
		if _, err := fresh.Restore(background, &s); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 5 {
		idle := time.Duration(5-i)*10*time.Second + down
		b, ok, _ := fresh.Peek(background, named(fmt.Sprint(i)))
		if ok != (idle < time.Minute) {
			t.Errorf("idle for %v: bound %v", idle, ok)
			continue
		}
		if !ok {
			continue
		}
		if left := b.Expires.Sub(clock.now()); left != time.Minute-idle {
			t.Errorf("idle for %v: lives for another %v", idle, left)
		}
		if b.Target != on(uint64(i)) || b.Scope != uint32(i) || b.Kind != Kind(i%2) || b.TTL != time.Minute {
			t.Errorf("restored as %+v", b)
		}
	}
	clock.advance(20 * time.Second)
	clock.advance(10 * time.Second)
	fresh.sweep()
	if n := fresh.Len(); n != 0 {
		t.Errorf("%d bindings are left after their time", n)
	}
}

// TestDumpSparesWhatRequestsUse has a long answer. Its binding is not idle.
func TestDumpSparesWhatRequestsUse(t *testing.T) {
	clock := new(fakeClock)
	r := open(t, Options{Clock: clock.now})
	s := NewSessions(r)
	var u Use
	s.Begin(&u, named("a"))
	if _, ok, err := u.Bind(background, 0, want(on(1), time.Minute, RouterOnly)); !ok || err != nil {
		t.Fatal(ok, err)
	}
	for range 5 {
		clock.advance(40 * time.Second)
		if got := dumped(t, r)[named("a")]; got.Idle != 0 || got.Target != on(1) {
			t.Errorf("dumped as %+v", got)
		}
	}
}

func TestRestoreLosesToALiveBinding(t *testing.T) {
	r := open(t, Options{})
	s := Saved{Key: named("a"), Want: want(on(1), time.Minute, RouterOnly)}
	live, _, _ := r.Bind(background, s.Key, 0, want(on(2), time.Minute, RouterOnly))
	if done, err := r.Restore(background, &s); done || err != nil {
		t.Error(done, err)
	}
	if b, _, _ := r.Peek(background, s.Key); b.Version != live.Version || b.Target != on(2) {
		t.Errorf("the live binding is %+v now", b)
	}
	if _, err := r.Restore(background, &Saved{Key: named("b")}); !errors.Is(err, ErrTTL) {
		t.Error(err)
	}
	r.Close()
	if _, err := r.Restore(background, &s); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if r.Dump(func([]Saved) bool { return true }) && r.Len() > 0 {
		t.Error("a closed store is dumped")
	}
}

// TestRestoreKeepsWhatWasUsedLast restores more bindings than fit, beside live ones.
func TestRestoreKeepsWhatWasUsedLast(t *testing.T) {
	clock := new(fakeClock)
	r := open(t, Options{Clock: clock.now, MaxSessions: 1000})
	clock.advance(time.Hour)
	for i := range 500 {
		r.Bind(background, named(fmt.Sprint("live", i)), 0, want(on(1), time.Hour, RouterOnly))
	}
	for i := range 2000 {
		idle := time.Duration(i*7%2000) * time.Second
		r.Restore(background, &Saved{Key: named(fmt.Sprint("old", i)), Want: want(on(2), time.Hour, RouterOnly), Idle: idle})
	}
	if n := r.Len(); n != 1000 {
		t.Errorf("%d bindings of 1000", n)
	}
	for i := range 500 {
		if _, ok, _ := r.Peek(background, named(fmt.Sprint("live", i))); !ok {
			t.Fatalf("live binding %d was evicted", i)
		}
	}
	young := 0
	for i := range 2000 {
		if _, ok, _ := r.Peek(background, named(fmt.Sprint("old", i))); ok && i*7%2000 < 700 {
			young++
		}
	}
	if young < 450 {
		t.Errorf("only %d of the 500 restored bindings are among the 700 used last", young)
	}
}

// TestVersionsDoNotRecurIfTheClockGoesBack begins a second store in the past.
func TestVersionsDoNotRecurIfTheClockGoesBack(t *testing.T) {
	clock := new(fakeClock)
	r := open(t, Options{Clock: clock.now})
	last, _, _ := r.Bind(background, named("a"), 0, want(on(1), time.Minute, RouterOnly))
	past := new(fakeClock)
	past.advance(-24 * time.Hour)
	later := open(t, Options{Clock: past.now})
	later.Skip(r.Changes())
	later.Skip(1)
	if b, _, _ := later.Bind(background, named("a"), 0, want(on(1), time.Minute, RouterOnly)); b.Version <= last.Version {
		t.Errorf("version %d after %d", b.Version, last.Version)
	}
}

// TestDumpBesideRequests dumps and restores while requests bind, use and unbind. A session
// that does not change is in every dump.
func TestDumpBesideRequests(t *testing.T) {
	r, copied := open(t, Options{Sweep: time.Millisecond}), open(t, Options{})
	for i := range 5000 {
		r.Bind(background, named(fmt.Sprint("still", i)), 0, want(on(1), time.Hour, RouterOnly))
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				key := named(fmt.Sprint("moving", g, i%300))
				b, ok, _ := r.Get(background, key)
				if ok && i%3 == 0 {
					r.Unbind(background, key, b.Version)
				} else {
					r.Bind(background, key, b.Version, want(on(uint64(i)), time.Hour, RouterOnly))
				}
				copied.Get(background, named(fmt.Sprint("still", i%5000)))
			}
		})
	}
	for range 10 {
		all := dumped(t, r)
		for i := range 5000 {
			if _, ok := all[named(fmt.Sprint("still", i))]; !ok {
				t.Fatalf("session %d is missing", i)
			}
		}
		for _, s := range all {
			if _, err := copied.Restore(background, &s); err != nil {
				t.Fatal(err)
			}
		}
	}
	close(stop)
	wg.Wait()
}

// BenchmarkDump dumps a million bindings.
func BenchmarkDump(b *testing.B) {
	r := open(b, Options{})
	for i := range 1_000_000 {
		r.Bind(background, named(fmt.Sprint(i)), 0, want(on(1), time.Hour, RouterOnly))
	}
	n := 0
	for b.Loop() {
		n = 0
		r.Dump(func(part []Saved) bool { n += len(part); return true })
	}
	b.ReportMetric(float64(n), "bindings")
}
