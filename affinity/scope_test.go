package affinity

import (
	"testing"
	"time"
)

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
			if _, ok, err := r.Bind(background, k, 0, Want{Target: on(1), TTL: time.Hour, Scope: scope}); !ok || err != nil {
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
	s := NewSessions(r)
	keys := numbered(201)
	uses := make([]Use, 200)
	for i := range uses {
		bindUse(t, s, &uses[i], keys[i])
	}
	c.advance(1)
	if _, _, err := r.Bind(background, keys[200], 0, want(on(2), time.Hour, RouterOnly)); err != ErrFull {
		t.Errorf("all are in use: %v", err)
	}
	for i := range 20 {
		uses[i].End(0)
	}
	c.advance(1)
	if _, ok, err := r.Bind(background, keys[200], 0, want(on(2), time.Hour, RouterOnly)); !ok || err != nil {
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
