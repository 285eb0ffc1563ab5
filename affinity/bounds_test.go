package affinity

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

func TestSweepRunsByItself(t *testing.T) {
	var l ends
	r := open(t, Options{OnExpire: l.record, Sweep: time.Millisecond})
	mustPut(t, r, "s", 1, time.Millisecond, EngineBacked)
	eventually(t, "the sweep notices", func() bool { return r.Len() == 0 })
	r.Reported()
	if got := l.take(); len(got) != 1 || got[0].why != Expired {
		t.Fatalf("reported %v", got)
	}
}

// OnExpire may use the store, and Close waits for it.
func TestOnExpireUsesTheStore(t *testing.T) {
	var r *Bindings
	ready, entered, leave := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var left atomic.Bool
	r = open(t, Options{MaxSessions: 1, OnExpire: func(k Key, _ Binding, _ Reason) {
		<-ready
		if _, _, err := r.Bind(k, 0, want(on(9), time.Hour, RouterOnly)); err != nil {
			t.Errorf("bind from OnExpire: %v", err)
		}
		close(entered)
		<-leave
		_, _ = r.Peek(k)
		left.Store(true)
	}})
	mustPut(t, r, "a", 1, time.Hour, EngineBacked)
	mustPut(t, r, "b", 1, time.Hour, RouterOnly)
	// Only now: b, which has ended a, would end what OnExpire puts as well were it
	// still looking for its place then.
	close(ready)
	<-entered
	if _, ok := peek(r, "a"); !ok {
		t.Error("what OnExpire put is not there")
	}
	closed := make(chan struct{})
	go func() { r.Close(); close(closed) }()
	eventually(t, "close begins", func() bool {
		_, err := put(r, "c", on(1), time.Hour, RouterOnly)
		return errors.Is(err, ErrFull)
	})
	select {
	case <-closed:
		t.Fatal("close did not wait for OnExpire")
	default:
	}
	close(leave)
	<-closed
	if !left.Load() {
		t.Fatal("closed before OnExpire returned")
	}
}

func TestBytesMatchesHeap(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector changes allocations")
	}
	const n = 150_000
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	r := open(t, Options{})
	before := heap()
	for i := range n {
		mustPut(t, r, fmt.Sprintf("session-%028d", i), 1, time.Hour, EngineBacked)
	}
	used, estimate := heap()-before, r.Bytes()
	t.Logf("%d bytes per binding, estimated %d", used/n, estimate/n)
	if used > estimate*5/4 || used < estimate/2 {
		t.Errorf("uses %d bytes, estimates %d", used, estimate)
	}
}

func TestUsesDoNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector changes allocations")
	}
	r := open(t, Options{})
	b := mustPut(t, r, "s", 1, time.Hour, EngineBacked)
	known, unknown, w := named("s"), named("unknown"), want(on(1), time.Hour, EngineBacked)
	for name, do := range map[string]func(){
		"get of a known session":    func() { r.Peek(known) },
		"get of an unknown session": func() { r.Peek(unknown) },
		"touch":                     func() { r.Touch(known, b.Version) },
		"bind of a known session":   func() { b, _, _ = r.Bind(known, b.Version, w) },
	} {
		if n := testing.AllocsPerRun(10_000, do); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// TestUndeliveredEndsAreBounded has an owner that does not keep up. The store drops ends above
// its bound, and neither blocks nor refuses.
func TestUndeliveredEndsAreBounded(t *testing.T) {
	const rounds, above = maxEnds + 1000, 500
	release := make(chan struct{})
	var calls atomic.Int64
	r := open(t, Options{MaxSessions: 50, OnExpire: func(Key, Binding, Reason) {
		<-release
		calls.Add(1)
	}})
	var b Binding
	var err error
	for i := range uint64(rounds) {
		if b, _, err = r.Bind(named("s"), b.Version, want(on(i), time.Hour, EngineBacked)); err != nil {
			t.Fatal(err)
		}
	}
	close(release)
	r.Reported()
	if n := calls.Load(); n < maxEnds || n > rounds-above {
		t.Errorf("%d of %d ends were delivered, the bound is %d", n, rounds-1, maxEnds)
	}
	mustPut(t, r, "s", 1, time.Hour, EngineBacked)
	if r.Reported(); calls.Load() == 0 {
		t.Error("no end was delivered after it caught up")
	}
}
