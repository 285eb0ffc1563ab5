package affinity

import (
	"fmt"
	"testing"
	"time"
)

// dumped returns all that Dump passes on.
func dumped(t testing.TB, r *Bindings) map[Key]Saved {
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
		if _, ok, err := old.Bind(named(fmt.Sprint(i)), 0, w); !ok || err != nil {
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
		fresh.Restore(&s)
	}
	for i := range 5 {
		idle := time.Duration(5-i)*10*time.Second + down
		b, ok := fresh.Peek(named(fmt.Sprint(i)))
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

// TestRestoreRefuses has bindings that must not be restored, and one in use that is not idle.
func TestRestoreRefuses(t *testing.T) {
	clock := new(fakeClock)
	r := open(t, Options{Clock: clock.now})
	var u Use
	live := bindUse(t, r, &u, named("a"))
	clock.advance(2 * time.Hour) // a request uses the binding
	saved := dumped(t, r)[named("a")]
	if saved.Idle != 0 || saved.Target != on(1) {
		t.Errorf("dumped as %+v", saved)
	}
	saved.Target = on(2)
	if r.Restore(&saved) {
		t.Error("one that a request uses is replaced")
	}
	if b, _ := r.Peek(named("a")); b.Version != live.Version || b.Target != on(1) {
		t.Errorf("the live binding is %+v now", b)
	}
	if r.Restore(&Saved{Key: named("b")}) {
		t.Error("one without a time to live is restored")
	}
	r.Close()
	if r.Restore(&saved) {
		t.Error("a closed store restores")
	}
}

// TestRestoreKeepsWhatWasUsedLast restores more bindings than fit, beside live ones.
func TestRestoreKeepsWhatWasUsedLast(t *testing.T) {
	clock := new(fakeClock)
	r := open(t, Options{Clock: clock.now, MaxSessions: 1000})
	clock.advance(time.Hour)
	for i := range 500 {
		r.Bind(named(fmt.Sprint("live", i)), 0, want(on(1), time.Hour, RouterOnly))
	}
	for i := range 2000 {
		idle := time.Duration(i*7%2000) * time.Second
		r.Restore(&Saved{Key: named(fmt.Sprint("old", i)), Want: want(on(2), time.Hour, RouterOnly), Idle: idle})
	}
	if n := r.Len(); n != 1000 {
		t.Errorf("%d bindings of 1000", n)
	}
	for i := range 500 {
		if _, ok := r.Peek(named(fmt.Sprint("live", i))); !ok {
			t.Fatalf("live binding %d was evicted", i)
		}
	}
	young := 0
	for i := range 2000 {
		if _, ok := r.Peek(named(fmt.Sprint("old", i))); ok && i*7%2000 < 700 {
			young++
		}
	}
	if young < 450 {
		t.Errorf("only %d of the 500 restored bindings are among the 700 used last", young)
	}
}
