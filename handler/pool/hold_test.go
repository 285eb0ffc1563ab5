package pool

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// busied returns a pool that holds requests, whose worker at a:1 is busy with a long prompt until done.
func busied(t *testing.T, s *Settings) (p *Pool, done func()) {
	p = testPool(t, s)
	a := p.Scheduler.Refs(p.Worker("a:1").Target(0))
	book := func(root uint64, tokens int64) *kvscore.Lease {
		r := &kvscore.Request{Prompt: cache.Prompt{Root: root, Tokens: tokens}, Streamed: true}
		_, l := p.Scheduler.Select(time.Now(), r, a, 0, nil, &kvscore.Selection{Rand: newRandom()})
		return l
	}
	for i := range 200 {
		n := int64(500 + 100*(i%20))
		l := book(uint64(i+1), n) //nolint:gosec // small
		time.Sleep(time.Duration(n) * 100 * time.Microsecond)
		l.FirstToken(time.Now())
		l.End(true, nil)
	}
	p.heed(&Wants{Tenant: 1}, time.Now())
	p.heed(&Wants{Tenant: 2}, time.Now())
	l := book(999, 1_000_000)
	return p, func() { l.End(true, nil) }
}

func anyWants() Wants {
	return Wants{Rank: AnyRank, Kind: worker.KindPlain, Prompt: 1000, Tenant: 1, Patience: 30 * time.Second, Arrival: time.Now()}
}

// TestRestsAreNotHeld has the rest of a stream come behind a held request.
func TestRestsAreNotHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, done := busied(t, wanted(worker.Settings{Dial: "a:1"}))
		seat := func(rest bool) time.Duration {
			o, want, s := new(Tables).Offers(p, upstreamsOf("a:1"), nil), anyWants(), new(Seat)
			want.Rest = rest
			waited, err := p.Seat(t.Context(), &want, &o, new(chooser), s)
			if err != nil {
				t.Error(err)
			}
			s.Leave(true, nil)
			return waited
		}
		go seat(false)
		synctest.Wait()
		if n, waited := p.Waiting(), seat(true); n != 1 || waited > 0 {
			t.Errorf("%d were held, and the rest waited for %v", n, waited)
		}
		done()
		time.Sleep(time.Minute)
	})
}

// TestHeldGoBeforeOthersAreRefused has a queue full of held requests when one comes that waits for a slot.
func TestHeldGoBeforeOthersAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set := wanted(worker.Settings{Dial: "a:1"}, worker.Settings{Dial: "b:1", MaxRunning: 1})
		set.MaxWaiting = 8
		p, done := busied(t, set)
		a, b := p.Worker("a:1"), p.Worker("b:1")
		b.TakeSlot()
		var refused atomic.Int32
		seat := func(only *worker.Worker) {
			o, want, s := new(Tables).Offers(p, upstreamsOf("a:1", "b:1"), nil), anyWants(), new(Seat)
			want.Only = only
			if _, err := p.Seat(t.Context(), &want, &o, new(chooser), s); err != nil {
				refused.Add(1)
				return
			}
			s.Leave(true, nil)
		}
		for range 8 {
			go seat(a)
			synctest.Wait()
		}
		go seat(b)
		synctest.Wait()
		if n := refused.Load(); n > 0 || p.Waiting() != 8 {
			t.Errorf("%d are refused, %d wait", n, p.Waiting())
		}
		p.queue.free(b)
		done()
		time.Sleep(time.Minute)
	})
}

// TestMonitorsAreNoTenants has one tenant, and requests for lists of models without a key.
func TestMonitorsAreNoTenants(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}))
	for _, kind := range []worker.AttemptKind{worker.KindPlain, worker.KindOther} {
		o, want, s := new(Tables).Offers(p, upstreamsOf("a:1"), nil), anyWants(), new(Seat)
		if want.Kind = kind; kind == worker.KindOther {
			want.Tenant = 0
		}
		if _, err := p.Seat(t.Context(), &want, &o, new(chooser), s); err != nil {
			t.Error(err)
		}
		s.Leave(true, nil)
	}
	if p.holds(time.Now()) {
		t.Error("requests are held, with one tenant")
	}
}

// TestLateRequestsOfSessions has a turn wait for its session's full worker, in a class that demotes late
// requests. The rest of a stream comes late in a class that refuses.
func TestLateRequestsOfSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := testPool(t, wanted(worker.Settings{Dial: "a:1", MaxRunning: 1}, worker.Settings{Dial: "b:1"}))
		for range 50 {
			p.Promises.Compare("fast", time.Second, time.Second, time.Second, time.Now())
		}
		a := p.Worker("a:1")
		a.TakeSlot()
		time.AfterFunc(2*time.Second, func() { p.queue.free(a) })
		for name, v := range map[string]struct {
			class queue.Class
			left  time.Duration
			rest  bool
			by    chooser
		}{
			"demoted": {queue.Class{Late: queue.Demote, Demote: &queue.Class{Name: "slow"}}, 500 * time.Millisecond, false, chooser{session: a}},
			"rest":    {queue.Class{Late: queue.Refuse}, -time.Second, true, chooser{}},
		} {
			o, want, s := new(Tables).Offers(p, upstreamsOf("a:1", "b:1"), nil), anyWants(), new(Seat)
			v.class.Name, v.class.TTFT = "fast", 500*time.Millisecond
			want.Class, want.Deadline, want.Rest = &v.class, time.Now().Add(v.left), v.rest
			if _, err := p.Seat(t.Context(), &want, &o, &v.by, s); err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			s.Leave(true, nil)
		}
	})
}

// TestFloodLongerThanTheQueue has a tenant with more requests under way than the queue takes, or than are
// served in max_wait. Another tenant has one at a time.
func TestFloodLongerThanTheQueue(t *testing.T) {
	others := func(hold string, most int) (mean time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			r := roomOf(t, hold, usual())
			set := *r.Settings.Load()
			set.MaxWaiting = most
			r.Settings.Store(&set)
			r.learn(t)
			var number atomic.Uint64
			number.Store(1 << 20)
			until := time.Now().Add(3 * time.Minute)
			ask := func(tenant uint64) time.Duration {
				took, err := r.ask(t.Context(), Wants{Tenant: tenant}, &load{tokens: 2000}, number.Add(1))
				if err != nil {
					t.Error(err)
				}
				return took
			}
			var flood sync.WaitGroup
			for range 400 {
				flood.Go(func() {
					for time.Now().Before(until) {
						ask(1)
					}
				})
			}
			time.Sleep(time.Minute)
			n := time.Duration(0)
			for ; time.Now().Before(until); n++ {
				mean += ask(2)
			}
			mean /= n
			flood.Wait()
		})
		return mean
	}
	off, long, short := others(HoldOff, 1024), others(HoldAuto, 1024), others(HoldAuto, 100)
	t.Logf("the other waits %v, held %v, held in a short queue %v", off, long, short)
	if long > off/5 || short > off {
		t.Error("one tenant starves the other")
	}
}

// TestSlotsAreNeverLostNorTooMany has clients that come, leave and are served at the same time, some of them
// for one worker only. Requests choose other workers than the queue has granted, which fill up.
func TestSlotsAreNeverLostNorTooMany(t *testing.T) {
	dials := []string{"a:1", "b:1", "c:1"}
	var set []worker.Settings
	for i, dial := range dials {
		set = append(set, worker.Settings{Dial: dial, MaxRunning: worker.RequestLimit(1 + i)})
	}
	p := testPool(t, wanted(set...))
	p.varied.Store(time.Now().Add(time.Hour).UnixNano())
	offers := new(Tables).Offers(p, upstreamsOf(dials...), nil)
	var served atomic.Int64
	var all sync.WaitGroup
	for g := range 64 {
		all.Go(func() {
			for i := range 30 {
				o, want, s := offers, anyWants(), new(Seat)
				want.Kind, want.Tenant = worker.KindStream, uint64(1+g%5) //nolint:gosec // small
				ctx, leave := t.Context(), func() {}
				if g%3 == 0 {
					ctx, leave = context.WithTimeout(ctx, time.Duration(1+(g+i)%5)*time.Millisecond)
				}
				if g%8 == 0 {
					want.Only = p.Worker(dials[i%3])
				}
				by := &priced{request: kvscore.Request{Prompt: cache.Prompt{Root: uint64(i), Tokens: 4000}, Streamed: true}} //nolint:gosec // small
				_, err := p.Seat(ctx, &want, &o, by, s)
				if left := ctx.Err() != nil; err != nil && !left {
					t.Error(err)
				}
				if err == nil {
					if running, limit := s.Worker.Running(); running > limit {
						t.Errorf("%d run, %d may", running, limit)
					}
					served.Add(1)
					time.Sleep(time.Duration(i%3) * 30 * time.Microsecond)
					s.Leave(true, nil)
				}
				leave()
			}
		})
	}
	all.Wait()
	if n := served.Load(); n < 32*30 {
		t.Errorf("%d are served", n)
	}
	for _, w := range p.All() {
		if n, _ := w.Running(); n != 0 {
			t.Errorf("%s: %d run", w.Dial, n)
		}
	}
	if n := p.Scheduler.Stats().Leases; n != 0 || p.Waiting() != 0 || p.queue.order.Len() != 0 {
		t.Errorf("%d leases, %d wait, %d are in order", n, p.Waiting(), p.queue.order.Len())
	}
}
