// Package storetest checks that a store of bindings keeps the contract of [affinity.Store]. It
// uses only the contract, real time and short times to live. So it can check stores with
// their own clocks, such as a server that routers share.
package storetest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

const (
	// life is the time to live of bindings that are to expire. Where a test needs a binding
	// alive, it checks how much time has really passed, and repeats if that was too much.
	life = 400 * time.Millisecond
	// slack is how late a store may notice an end.
	slack = 100 * time.Millisecond
	long  = time.Hour
)

// Run checks the stores that open returns. Each must be empty, have room for 1,000 bindings of
// one scope, and may take everything that a test binds. Run closes them.
func Run(t *testing.T, open func() affinity.Store) {
	for _, tt := range []struct {
		name string
		test func(*suite)
	}{
		{"UnknownSessionIsUnbound", (*suite).unknown},
		{"BindThenGet", (*suite).bindThenGet},
		{"BindChangesEverything", (*suite).rebind},
		{"LostBindReturnsTheWinner", (*suite).conflict},
		{"UnbindEndsItsVersionOnly", (*suite).unbind},
		{"TouchRenewsItsVersionOnly", (*suite).touch},
		{"BindingExpires", (*suite).expires},
		{"GetSlides", (*suite).getSlides},
		{"PeekDoesNotSlide", (*suite).peekKeeps},
		{"LostBindDoesNotSlide", (*suite).conflictKeeps},
		{"ExpiredVersionBindsNothing", (*suite).expiredVersion},
		{"VersionsGrow", (*suite).versionsGrow},
		{"TimeToLiveIsPositive", (*suite).badTTL},
		{"ListPages", (*suite).list},
		{"OneBindOfManyWins", (*suite).oneWins},
		{"BindsLoseNoUpdate", (*suite).noLostUpdate},
		{"RandomOperations", (*suite).random},
		{"CloseEndsEverything", (*suite).close},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &suite{t: t, ctx: t.Context(), store: open(), rnd: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))} //nolint:gosec // a test
			defer s.store.Close()
			tt.test(s)
		})
	}
}

type suite struct {
	t     *testing.T
	ctx   context.Context
	store affinity.Store
	rnd   *rand.Rand
}

// key returns a new key.
func (s *suite) key() (k affinity.Key) {
	binary.BigEndian.PutUint64(k[:8], s.rnd.Uint64())
	binary.BigEndian.PutUint64(k[8:], s.rnd.Uint64())
	return k
}

func want(worker uint64, ttl time.Duration) affinity.Want {
	return affinity.Want{Target: kvscore.Target{Worker: worker, Rank: 3}, TTL: ttl, Scope: 5}
}

// bind binds a session that must not be bound.
func (s *suite) bind(k affinity.Key, w affinity.Want) affinity.Binding {
	s.t.Helper()
	b, ok, err := s.store.Bind(s.ctx, k, 0, w)
	if !ok || err != nil || b.Want != w || b.Version == 0 {
		s.t.Fatalf("binding to %+v: got %+v, %v, %v", w, b, ok, err)
	}
	return b
}

// same checks what a method returned. Expires may differ.
func (s *suite) same(what string, got affinity.Binding, ok bool, err error, want affinity.Binding, wantOK bool) {
	s.t.Helper()
	if got.Want != want.Want || got.Version != want.Version || ok != wantOK || err != nil {
		s.t.Fatalf("%s: got %+v, %v, %v; want %+v, %v", what, got, ok, err, want, wantOK)
	}
}

func (s *suite) bound(k affinity.Key, want affinity.Binding) {
	s.t.Helper()
	got, ok, err := s.store.Peek(s.ctx, k)
	s.same("peek", got, ok, err, want, true)
}

func (s *suite) gone(k affinity.Key) {
	s.t.Helper()
	got, ok, err := s.store.Peek(s.ctx, k)
	s.same("peek of a session without a binding", got, ok, err, affinity.Binding{}, false)
}

func (s *suite) unknown() {
	k := s.key()
	s.gone(k)
	got, ok, err := s.store.Get(s.ctx, k)
	s.same("get", got, ok, err, affinity.Binding{}, false)
	got, ok, err = s.store.Touch(s.ctx, k, 1)
	s.same("touch", got, ok, err, affinity.Binding{}, false)
	got, ok, err = s.store.Unbind(s.ctx, k, 1)
	s.same("unbind", got, ok, err, affinity.Binding{}, false)
	got, ok, err = s.store.Bind(s.ctx, k, 1, want(1, long))
	s.same("bind over a version that is gone", got, ok, err, affinity.Binding{}, false)
	s.gone(k)
}

func (s *suite) bindThenGet() {
	k, other := s.key(), s.key()
	began := time.Now()
	b := s.bind(k, want(42, long))
	if d := b.Expires.Sub(began) - long; d < -slack || d > time.Since(began)+slack {
		s.t.Errorf("expires %v from when it should", d)
	}
	s.bound(k, b)
	got, ok, err := s.store.Get(s.ctx, k)
	s.same("get", got, ok, err, b, true)
	s.gone(other)
}

func (s *suite) rebind() {
	k := s.key()
	first := s.bind(k, want(1, life))
	w := affinity.Want{Target: kvscore.Target{Worker: 1<<64 - 1, Rank: 1<<32 - 1}, TTL: long, Scope: 5, Kind: affinity.EngineBacked}
	second, ok, err := s.store.Bind(s.ctx, k, first.Version, w)
	s.same("bind", second, ok, err, affinity.Binding{Want: w, Version: second.Version}, true)
	if second.Version <= first.Version {
		s.t.Errorf("version %d after %d", second.Version, first.Version)
	}
	time.Sleep(life + slack)
	s.bound(k, second) // by its own time to live
}

func (s *suite) conflict() {
	k := s.key()
	first := s.bind(k, want(1, long))
	got, ok, err := s.store.Bind(s.ctx, k, 0, want(2, long))
	s.same("bind of a session that is bound", got, ok, err, first, false)
	second, _, _ := s.store.Bind(s.ctx, k, first.Version, want(1, long))
	got, ok, err = s.store.Bind(s.ctx, k, first.Version, want(3, long))
	s.same("bind over an earlier version of the same target", got, ok, err, second, false)
	s.bound(k, second)
}

func (s *suite) unbind() {
	k, other := s.key(), s.key()
	b, left := s.bind(k, want(1, long)), s.bind(other, want(2, long))
	for _, v := range []affinity.Version{0, b.Version - 1, b.Version + 1, left.Version} {
		got, ok, err := s.store.Unbind(s.ctx, k, v)
		s.same("unbind of another version", got, ok, err, b, false)
	}
	got, ok, err := s.store.Unbind(s.ctx, k, b.Version)
	s.same("unbind", got, ok, err, b, true)
	s.gone(k)
	got, ok, err = s.store.Unbind(s.ctx, k, b.Version)
	s.same("unbind again", got, ok, err, affinity.Binding{}, false)
	s.bound(other, left)
}

func (s *suite) expires() {
	k := s.key()
	s.bind(k, want(1, life))
	time.Sleep(life + slack)
	s.gone(k)
	got, ok, err := s.store.Get(s.ctx, k)
	s.same("get", got, ok, err, affinity.Binding{}, false)
	s.bind(k, want(2, long))
}

// inTime calls f with a new binding after three fifths of its life, until that succeeds before
// the life is over. f returns when it has restarted that life, or has tried to.
func (s *suite) inTime(f func(k affinity.Key, b affinity.Binding)) (k affinity.Key, b affinity.Binding) {
	s.t.Helper()
	for range 20 {
		k = s.key()
		began := time.Now()
		b = s.bind(k, want(1, life))
		time.Sleep(life * 3 / 5)
		if got, ok, _ := s.store.Peek(s.ctx, k); time.Since(began) < life && (!ok || got.Version != b.Version) {
			s.t.Fatalf("gone before its time: %+v, %v", got, ok)
		}
		if time.Since(began) >= life*4/5 {
			continue // the machine is slow
		}
		f(k, b)
		if time.Since(began) < life {
			return k, b
		}
	}
	s.t.Skip("the machine is too slow")
	return k, b
}

// slides checks that f restarts the time to live.
func (s *suite) slides(f func(k affinity.Key, b affinity.Binding)) {
	s.t.Helper()
	for range 20 {
		var began time.Time
		k, b := s.inTime(func(k affinity.Key, b affinity.Binding) {
			began = time.Now()
			f(k, b)
		})
		time.Sleep(life * 3 / 5) // past the first end
		got, ok, err := s.store.Peek(s.ctx, k)
		if time.Since(began) < life {
			s.same("after the time to live restarted", got, ok, err, b, true)
			return
		}
	}
	s.t.Skip("the machine is too slow")
}

func (s *suite) getSlides() {
	s.slides(func(k affinity.Key, b affinity.Binding) {
		if got, ok, err := s.store.Get(s.ctx, k); ok && got.Version != b.Version || err != nil {
			s.t.Fatalf("got %+v, %v", got, err)
		}
	})
}

func (s *suite) touch() {
	s.slides(func(k affinity.Key, b affinity.Binding) {
		if got, ok, err := s.store.Touch(s.ctx, k, b.Version); ok && got.Version != b.Version || err != nil {
			s.t.Fatalf("touched %+v, %v", got, err)
		}
	})
	k, _ := s.inTime(func(k affinity.Key, b affinity.Binding) {
		if got, ok, err := s.store.Touch(s.ctx, k, b.Version+1); ok || err != nil || got.Version != 0 && got.Version != b.Version {
			s.t.Fatalf("touched another version: %+v, %v, %v", got, ok, err)
		}
	})
	time.Sleep(life*2/5 + slack)
	s.gone(k)
}

func (s *suite) peekKeeps() {
	k, _ := s.inTime(func(k affinity.Key, _ affinity.Binding) { _, _, _ = s.store.Peek(s.ctx, k) })
	time.Sleep(life*2/5 + slack)
	s.gone(k)
}

func (s *suite) conflictKeeps() {
	k, _ := s.inTime(func(k affinity.Key, b affinity.Binding) {
		if _, ok, _ := s.store.Bind(s.ctx, k, b.Version+1, want(2, long)); ok {
			s.t.Fatal("bound over another version")
		}
	})
	time.Sleep(life*2/5 + slack)
	s.gone(k)
}

func (s *suite) expiredVersion() {
	k := s.key()
	b := s.bind(k, want(1, life))
	time.Sleep(life + slack)
	got, ok, err := s.store.Bind(s.ctx, k, b.Version, want(1, long))
	s.same("bind over an expired version", got, ok, err, affinity.Binding{}, false)
	got, ok, err = s.store.Touch(s.ctx, k, b.Version)
	s.same("touch of an expired version", got, ok, err, affinity.Binding{}, false)
	got, ok, err = s.store.Unbind(s.ctx, k, b.Version)
	s.same("unbind of an expired version", got, ok, err, affinity.Binding{}, false)
	next := s.bind(k, want(1, long))
	got, ok, err = s.store.Unbind(s.ctx, k, b.Version)
	s.same("unbind of an earlier binding's version", got, ok, err, next, false)
}

func (s *suite) versionsGrow() {
	k, last := s.key(), affinity.Version(0)
	for range 20 {
		b := s.bind(k, want(1, long))
		if b.Version <= last {
			s.t.Fatalf("version %d after %d", b.Version, last)
		}
		last = b.Version
		_, _, _ = s.store.Unbind(s.ctx, k, last)
	}
}

func (s *suite) badTTL() {
	k := s.key()
	for _, ttl := range []time.Duration{0, -1} {
		if _, ok, err := s.store.Bind(s.ctx, k, 0, want(1, ttl)); ok || !errors.Is(err, affinity.ErrTTL) {
			s.t.Errorf("for %v: %v, %v", ttl, ok, err)
		}
	}
	s.gone(k)
}

func (s *suite) list() {
	live := make(map[affinity.Key]affinity.Binding)
	for i := range 300 {
		k := s.key()
		b := s.bind(k, want(uint64(i), long)) //nolint:gosec // small
		if i%3 == 0 {
			_, _, _ = s.store.Unbind(s.ctx, k, b.Version)
			continue
		}
		live[k] = b
	}
	var after affinity.Key
	for {
		page, err := s.store.List(s.ctx, after, 70)
		if err != nil || len(page) > 70 {
			s.t.Fatalf("a page of %d, %v", len(page), err)
		}
		for _, e := range page {
			if bytes.Compare(e.Key[:], after[:]) <= 0 {
				s.t.Fatalf("%s after %s", e.Key, after)
			}
			after = e.Key
			s.same("listed", e.Binding, true, nil, live[e.Key], true)
			delete(live, e.Key)
		}
		if len(page) < 70 {
			break
		}
	}
	if len(live) != 0 {
		s.t.Errorf("%d bindings are not listed", len(live))
	}
}

func (s *suite) oneWins() {
	for range 50 {
		k := s.key()
		var got [8]affinity.Binding
		var won [8]bool
		var wg sync.WaitGroup
		for i := range got {
			wg.Go(func() {
				var err error
				if got[i], won[i], err = s.store.Bind(s.ctx, k, 0, want(uint64(i), long)); err != nil { //nolint:gosec // small
					s.t.Error(err)
				}
			})
		}
		wg.Wait()
		winners := 0
		for i, b := range got {
			if won[i] {
				winners++
			}
			if b.Version != got[0].Version || b.Target != got[0].Target {
				s.t.Fatalf("the winner is seen as %+v and %+v", b, got[0])
			}
		}
		if winners != 1 {
			s.t.Fatalf("%d winners", winners)
		}
	}
}

// noLostUpdate counts with the number of the worker.
func (s *suite) noLostUpdate() {
	const goroutines, increments = 8, 50
	k := s.key()
	s.bind(k, want(0, long))
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for range increments {
				b, _, err := s.store.Get(s.ctx, k)
				for ok := false; !ok && err == nil; {
					b, ok, err = s.store.Bind(s.ctx, k, b.Version, want(b.Target.Worker+1, long))
				}
				if err != nil {
					s.t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if b, _, _ := s.store.Peek(s.ctx, k); b.Target.Worker != goroutines*increments {
		s.t.Errorf("counted %d of %d", b.Target.Worker, goroutines*increments)
	}
}

// random compares each goroutine's own sessions with a map, while all use the store at once.
func (s *suite) random() {
	var wg sync.WaitGroup
	for range 4 {
		keys := make([]affinity.Key, 20)
		for i := range keys {
			keys[i] = s.key()
		}
		rnd := rand.New(rand.NewPCG(s.rnd.Uint64(), 0)) //nolint:gosec // a test
		wg.Go(func() {
			model := make(map[affinity.Key]affinity.Binding)
			for range 1000 {
				if !s.step(model, keys[rnd.IntN(len(keys))], rnd) {
					return
				}
			}
		})
	}
	wg.Wait()
}

// step does one random operation on a session, and returns whether the model agrees.
func (s *suite) step(model map[affinity.Key]affinity.Binding, k affinity.Key, rnd *rand.Rand) bool {
	has := model[k]
	v := has.Version
	if rnd.IntN(4) == 0 {
		v = affinity.Version(rnd.Uint64()) //nolint:gosec // any will do
	}
	var b affinity.Binding
	var ok bool
	var err error
	after, wantOK := has, has.Version == v && v != 0
	op := rnd.IntN(5)
	switch op {
	case 0:
		b, ok, err = s.store.Get(s.ctx, k)
		wantOK = has.Version != 0
	case 1:
		b, ok, err = s.store.Peek(s.ctx, k)
		wantOK = has.Version != 0
	case 2:
		b, ok, err = s.store.Touch(s.ctx, k, v)
	case 3:
		if b, ok, err = s.store.Unbind(s.ctx, k, v); wantOK {
			after = affinity.Binding{}
		}
	case 4:
		w := want(rnd.Uint64N(4), long)
		b, ok, err = s.store.Bind(s.ctx, k, v, w)
		if wantOK = has.Version == v; wantOK {
			has = affinity.Binding{Want: w, Version: b.Version}
			after = has
		}
	}
	model[k] = after
	if ok != wantOK || err != nil || b.Want != has.Want || b.Version != has.Version {
		s.t.Errorf("operation %d with version %d: got %+v, %v, %v; want %+v, %v", op, v, b, ok, err, has, wantOK)
		return false
	}
	return true
}

func (s *suite) close() {
	k := s.key()
	b := s.bind(k, want(1, long))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				if _, _, err := s.store.Get(s.ctx, k); err != nil {
					return
				}
			}
		})
	}
	for range 2 {
		if err := s.store.Close(); err != nil {
			s.t.Errorf("closing: %v", err)
		}
	}
	wg.Wait()
	_, _, errGet := s.store.Get(s.ctx, k)
	_, _, errPeek := s.store.Peek(s.ctx, k)
	_, _, errTouch := s.store.Touch(s.ctx, k, b.Version)
	_, _, errUnbind := s.store.Unbind(s.ctx, k, b.Version)
	_, _, errBind := s.store.Bind(s.ctx, k, 0, want(1, long))
	_, errList := s.store.List(s.ctx, affinity.Key{}, 1)
	for i, err := range []error{errGet, errPeek, errTouch, errUnbind, errBind, errList} {
		if !errors.Is(err, affinity.ErrClosed) {
			s.t.Errorf("method %d after Close: %v", i, err)
		}
	}
}
