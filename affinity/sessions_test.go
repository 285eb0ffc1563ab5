package affinity

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// bindUse makes u a live request of the session, and binds it to target 1.
func bindUse(t *testing.T, s *Bindings, u *Use, key Key) Binding {
	t.Helper()
	s.Begin(u, key)
	b, _, err := u.Find(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if b.Version != 0 {
		return b
	}
	b, ok, err := u.Bind(0, want(on(1), time.Hour, RouterOnly))
	if !ok || err != nil {
		t.Fatal(ok, err)
	}
	return b
}

// found says what Find has returned.
func found(b Binding, pending bool, _ error) string {
	switch {
	case b.Version != 0:
		return "bound"
	case b.Target != kvscore.Target{}:
		return "chosen"
	case pending:
		return "pending"
	}
	return "first"
}

// TestWaitingForTheFirst has a second request meet a first one in each of its phases.
func TestWaitingForTheFirst(t *testing.T) {
	for _, tt := range []struct {
		name     string
		first    func(u *Use, cancel func())
		patience time.Duration
		found    string
		waited   time.Duration
		err      error
	}{
		{"it binds", func(u *Use, _ func()) {
			u.Choose(on(7))
			time.Sleep(30 * time.Millisecond)
			_, _, _ = u.Bind(0, want(on(7), time.Minute, RouterOnly))
		}, Patience, "bound", 30 * time.Millisecond, nil},
		{"it fails", func(u *Use, _ func()) {
			u.Choose(on(7))
			time.Sleep(30 * time.Millisecond)
			u.Yield()
		}, Patience, "first", 30 * time.Millisecond, nil},
		{"it ends", func(u *Use, _ func()) {
			time.Sleep(30 * time.Millisecond)
			u.End(0)
		}, Patience, "first", 30 * time.Millisecond, nil},
		{"its answer takes long", func(u *Use, _ func()) { u.Choose(on(7)) }, Patience, "chosen", Patience, nil},
		{"it chooses late", func(u *Use, _ func()) {
			time.Sleep(Patience / 2)
			u.Choose(on(7))
		}, Patience, "chosen", Patience, nil},
		{"it does not choose", func(*Use, func()) {}, Patience, "pending", Patience, nil},
		{"the second has no patience", func(u *Use, _ func()) { u.Choose(on(7)) }, 0, "chosen", 0, nil},
		{"the second has no patience, the first no target", func(*Use, func()) {}, 0, "pending", 0, nil},
		{"the second is cancelled", func(_ *Use, cancel func()) {
			time.Sleep(30 * time.Millisecond)
			cancel()
		}, Patience, "first", 30 * time.Millisecond, context.Canceled},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := open(t, Options{})
				defer r.Close()
				var first, second Use
				r.Begin(&first, named("s"))
				if got := found(first.Find(t.Context(), Patience)); got != "first" {
					t.Fatalf("the first finds %q", got)
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var wg sync.WaitGroup
				if tt.patience > 0 {
					wg.Go(func() { tt.first(&first, cancel) })
				} else {
					tt.first(&first, cancel)
				}
				r.Begin(&second, named("s"))
				began := time.Now()
				b, pending, err := second.Find(ctx, tt.patience)
				if got, waited := found(b, pending, err), time.Since(began); got != tt.found || waited != tt.waited || !errors.Is(err, tt.err) {
					t.Errorf("%q after %v, %v; want %q after %v", got, waited, err, tt.found, tt.waited)
				}
				if b.Target != on(7) && b != (Binding{}) {
					t.Errorf("found %+v", b)
				}
				wg.Wait()
				first.End(0)
				second.End(0)
				if r.Live() != 0 {
					t.Error("the session is still live")
				}
			})
		})
	}
}

// TestLiveRequestKeepsItsBinding lets a request take three times the time to live.
func TestLiveRequestKeepsItsBinding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 10 * time.Second
		s := open(t, Options{Sweep: time.Second})
		defer s.Close()
		var u, other Use
		b := bindUse(t, s, &u, named("s"))
		b, _, _ = u.Bind(b.Version, want(on(1), ttl, RouterOnly))
		s.Begin(&other, named("s"))
		other.End(0) // another's end changes nothing
		time.Sleep(3*ttl + time.Second/2)
		if got, ok := peek(s, "s"); !ok || got.Version != b.Version {
			t.Fatalf("after three times its time to live: %+v, %v", got, ok)
		}
		u.End(b.Version)
		time.Sleep(ttl - 1)
		if got, ok := peek(s, "s"); !ok || got.Version != b.Version {
			t.Errorf("the time to live did not restart at the end: %+v, %v", got, ok)
		}
		time.Sleep(1) // no sweep has noticed
		s.Begin(&other, named("s"))
		if b, _, _ := other.Find(t.Context(), 0); b.Version != 0 {
			t.Error("alive without requests")
		}
		other.End(0)
	})
}

// TestSessionsClose has requests that come after the end of the store, and the zero Use.
func TestSessionsClose(t *testing.T) {
	s := open(t, Options{})
	var u, none Use
	s.Begin(&u, named("s"))
	_ = s.Close()
	if b, pending, err := u.Find(t.Context(), Patience); b != (Binding{}) || pending || err != nil {
		t.Errorf("found %+v, %v, %v", b, pending, err)
	}
	if _, ok, err := u.Bind(0, want(on(1), time.Minute, RouterOnly)); ok || !errors.Is(err, ErrFull) {
		t.Errorf("bound %v, %v", ok, err)
	}
	u.End(1)
	none.Choose(on(1))
	none.Yield()
	none.End(1)
	if _, pending, err := none.Find(t.Context(), Patience); pending || err != nil {
		t.Errorf("the zero use: %v, %v", pending, err)
	}
}

// TestAloneKeepsOthersOut has two requests that want a session alone.
func TestAloneKeepsOthersOut(t *testing.T) {
	s := open(t, Options{})
	var first, second Use
	key := named("s")
	s.Begin(&first, key)
	s.Begin(&second, key)
	if ok, err := first.Alone(t.Context(), 0); !ok || err != nil || !s.HasAlone(key) {
		t.Fatal(ok, err)
	}
	if ok, err := second.Alone(t.Context(), time.Millisecond); ok || err != nil {
		t.Error("two have the session alone", err)
	}
	time.AfterFunc(time.Millisecond, func() { first.End(0) })
	if ok, err := second.Alone(t.Context(), time.Minute); !ok || err != nil {
		t.Error("the second does not get the session after the first", err)
	}
	if second.End(0); s.HasAlone(key) {
		t.Error("the session is still taken")
	}
}
