package affinity

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// bindUse makes u a live request of the session, and binds it to target 1.
func bindUse(t *testing.T, s *Sessions, u *Use, key Key) Binding {
	t.Helper()
	s.Begin(u, key)
	b, state, err := u.Find(background, 0)
	if err != nil {
		t.Fatal(err)
	}
	if state == Bound {
		return b
	}
	b, ok, err := u.Bind(background, 0, want(on(1), time.Hour, RouterOnly))
	if !ok || err != nil {
		t.Fatal(ok, err)
	}
	return b
}

// TestFirstRequestsGoToOneTarget has many first requests of a session choose at once, each
// another target. All go to one.
func TestFirstRequestsGoToOneTarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := open(t, Options{})
		s := NewSessions(r)
		for round := range 100 {
			key := named(string(rune(round)))
			var targets [8]kvscore.Target
			var openers atomic.Int64
			each(len(targets), func(i int) {
				var u Use
				s.Begin(&u, key)
				b, state, err := u.Find(background, Patience)
				if err != nil {
					t.Error(err)
				}
				at := b.Target
				if state == Opening {
					openers.Add(1)
					at = on(uint64(i)) //nolint:gosec // small
					u.Choose(at)
					time.Sleep(Patience / 2) // until the answer begins
				} else if state != Bound {
					t.Errorf("state %d", state)
				}
				b, _, err = u.Bind(background, b.Version, want(at, time.Minute, RouterOnly))
				if err != nil {
					t.Error(err)
				}
				targets[i] = b.Target
				_ = u.End(background, b.Version)
			})
			for _, at := range targets {
				if at != targets[0] {
					t.Fatalf("one session on %v", targets)
				}
			}
			if openers.Load() != 1 {
				t.Fatalf("%d requests initialised the binding", openers.Load())
			}
		}
		if s.Live() != 0 {
			t.Errorf("%d sessions are still live", s.Live())
		}
		r.Close()
	})
}

// TestWaitingForTheFirst has a second request meet a first one in each of its phases.
func TestWaitingForTheFirst(t *testing.T) {
	for _, tt := range []struct {
		name     string
		first    func(u *Use, cancel func())
		patience time.Duration
		state    State
		waited   time.Duration
		err      error
	}{
		{"it binds", func(u *Use, _ func()) {
			u.Choose(on(7))
			time.Sleep(30 * time.Millisecond)
			_, _, _ = u.Bind(background, 0, want(on(7), time.Minute, RouterOnly))
		}, Patience, Bound, 30 * time.Millisecond, nil},
		{"it fails", func(u *Use, _ func()) {
			u.Choose(on(7))
			time.Sleep(30 * time.Millisecond)
			u.Yield()
		}, Patience, Opening, 30 * time.Millisecond, nil},
		{"it ends", func(u *Use, _ func()) {
			time.Sleep(30 * time.Millisecond)
			_ = u.End(background, 0)
		}, Patience, Opening, 30 * time.Millisecond, nil},
		{"its answer takes long", func(u *Use, _ func()) { u.Choose(on(7)) }, Patience, Following, Patience, nil},
		{"it chooses late", func(u *Use, _ func()) {
			time.Sleep(Patience / 2)
			u.Choose(on(7))
		}, Patience, Following, Patience, nil},
		{"it does not choose", func(*Use, func()) {}, Patience, Free, Patience, nil},
		{"the second has no patience", func(u *Use, _ func()) { u.Choose(on(7)) }, 0, Following, 0, nil},
		{"the second has no patience, the first no target", func(*Use, func()) {}, 0, Free, 0, nil},
		{"the second is cancelled", func(_ *Use, cancel func()) {
			time.Sleep(30 * time.Millisecond)
			cancel()
		}, Patience, Free, 30 * time.Millisecond, context.Canceled},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := open(t, Options{})
				defer r.Close()
				s := NewSessions(r)
				var first, second Use
				s.Begin(&first, named("s"))
				if _, state, _ := first.Find(background, Patience); state != Opening {
					t.Fatalf("the first finds state %d", state)
				}
				ctx, cancel := context.WithCancel(background)
				defer cancel()
				var wg sync.WaitGroup
				if tt.patience > 0 {
					wg.Go(func() { tt.first(&first, cancel) })
				} else {
					tt.first(&first, cancel)
				}
				s.Begin(&second, named("s"))
				began := time.Now()
				b, state, err := second.Find(ctx, tt.patience)
				if waited := time.Since(began); state != tt.state || waited != tt.waited || !errors.Is(err, tt.err) {
					t.Errorf("state %d after %v, %v; want %d after %v", state, waited, err, tt.state, tt.waited)
				}
				if (state == Bound || state == Following) != (b.Target == on(7)) || (b.Version != 0) != (state == Bound) {
					t.Errorf("found %+v", b)
				}
				wg.Wait()
				_ = first.End(background, 0)
				_ = second.End(background, 0)
				if s.Live() != 0 {
					t.Error("the session is still live")
				}
			})
		})
	}
}

// TestFollowerBinds has the second request's answer come first: it binds the session, and the
// first learns that.
func TestFollowerBinds(t *testing.T) {
	r := open(t, Options{})
	s := NewSessions(r)
	var first, second Use
	s.Begin(&first, named("s"))
	s.Begin(&second, named("s"))
	_, _, _ = first.Find(background, 0)
	first.Choose(on(3))
	b, state, _ := second.Find(background, 0)
	if state != Following {
		t.Fatalf("state %d", state)
	}
	bound, ok, err := second.Bind(background, b.Version, want(b.Target, time.Minute, RouterOnly))
	if !ok || err != nil {
		t.Fatal(ok, err)
	}
	if got, ok, err := first.Bind(background, 0, want(on(4), time.Minute, RouterOnly)); ok || err != nil || got != bound {
		t.Errorf("the first got %+v, %v, %v; want what the second bound", got, ok, err)
	}
	first.Yield()
	if got, state, _ := first.Find(background, 0); state != Bound || got.Version != bound.Version {
		t.Errorf("found %+v, %d", got, state)
	}
	_, _ = first.End(background, 0), second.End(background, 0)
}

// TestLiveRequestKeepsItsBinding lets a request take three times the time to live. One store
// asks which bindings are in use, the other gets a Touch of them.
func TestLiveRequestKeepsItsBinding(t *testing.T) {
	const ttl = 10 * time.Second
	for name, wrap := range map[string]func(*Ristretto) Store{
		"asks": func(r *Ristretto) Store { return r },
		"told": func(r *Ristretto) Store { return struct{ Store }{r} },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := open(t, Options{Sweep: time.Second})
				s := NewSessions(wrap(r))
				defer s.Close()
				var u, other Use
				s.Begin(&u, named("s"))
				s.Begin(&other, named("s"))
				_, _, _ = u.Find(background, 0)
				b, ok, err := u.Bind(background, 0, want(on(1), ttl, RouterOnly))
				if !ok || err != nil {
					t.Fatal(ok, err)
				}
				_ = other.End(background, 0) // another's end changes nothing
				time.Sleep(3*ttl + time.Second/2)
				if got, ok := peek(s, "s"); !ok || got.Version != b.Version {
					t.Fatalf("after three times its time to live: %+v, %v", got, ok)
				}
				_ = u.End(background, b.Version)
				time.Sleep(ttl - 1)
				if got, ok := peek(s, "s"); !ok || got.Version != b.Version {
					t.Errorf("the time to live did not restart at the end: %+v, %v", got, ok)
				}
				time.Sleep(1)
				if _, ok := peek(s, "s"); ok {
					t.Error("alive without requests")
				}
			})
		})
	}
}

// TestUsesRaceExpiry renews, rebinds and ends sessions while their deadlines pass. No binding
// ends under a request that uses it, and a request's record ends with it. The clock stands
// while a request finds its binding: that takes less than any time to live.
func TestUsesRaceExpiry(t *testing.T) {
	var c fakeClock
	r := open(t, Options{Clock: c.now, OnExpire: func(Key, Binding, Reason) {}})
	s := NewSessions(r)
	keys := numbered(16)
	var clock sync.RWMutex
	advance := func(d time.Duration) {
		clock.Lock()
		defer clock.Unlock()
		c.advance(d)
	}
	var stop atomic.Bool
	var sweeps sync.WaitGroup
	sweeps.Go(func() {
		for !stop.Load() {
			advance(time.Duration(rand.Int64N(100)))
			r.sweep()
		}
	})
	each(6, func(int) {
		for range 5000 {
			var u Use
			s.Begin(&u, keys[rand.IntN(len(keys))])
			clock.RLock()
			b, state, err := u.Find(background, time.Millisecond)
			if err != nil {
				t.Error(err)
			}
			if state != Bound {
				b, _, err = u.Bind(background, 0, want(on(1), 50, EngineBacked))
				if err != nil {
					t.Error(err)
				}
			}
			clock.RUnlock()
			advance(60) // longer than the time to live
			if got, ok, _ := r.Peek(background, u.key); b.Version != 0 && (!ok || got.Version < b.Version) {
				t.Errorf("version %d ended while it was in use: %+v, %v", b.Version, got, ok)
			}
			_ = u.End(background, b.Version)
		}
	})
	stop.Store(true)
	sweeps.Wait()
	if s.Live() != 0 {
		t.Errorf("%d sessions are still live", s.Live())
	}
	c.advance(100)
	r.sweep()
	settled(t, r)
	if r.Len() != 0 {
		t.Errorf("%d bindings are left", r.Len())
	}
}

// TestSessionsClose ends the keeper's goroutine, and tolerates requests that come later.
func TestSessionsClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewSessions(struct{ Store }{open(t, Options{})})
		var u Use
		s.Begin(&u, named("s"))
		each(2, func(int) { _ = s.Close() })
		if _, state, err := u.Find(background, Patience); state != Free || !errors.Is(err, ErrClosed) {
			t.Errorf("state %d, %v", state, err)
		}
		if _, ok, err := u.Bind(background, 0, want(on(1), time.Minute, RouterOnly)); ok || !errors.Is(err, ErrClosed) {
			t.Errorf("bound %v, %v", ok, err)
		}
		if err := u.End(background, 1); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		var none Use
		none.Choose(on(1))
		none.Yield()
		if _, state, err := none.Find(background, Patience); state != Free || err != nil || none.End(background, 1) != nil {
			t.Errorf("the zero use: state %d, %v", state, err)
		}
	})
}
