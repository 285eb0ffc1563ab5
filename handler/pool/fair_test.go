package pool

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

func usual() *simulated {
	return &simulated{step: 8192, fixed: 5 * time.Millisecond, token: 50 * time.Microsecond, answer: 2 * time.Second}
}

// learn has the engines show how fast they are.
func (r *room) learn(t *testing.T) { r.serve(t, &load{2, 2000, time.Second, 30, false, 0, false}) }

// TestFlood has a tenant with many long prompts at once, beside others with short ones. It compares their
// time to the first token with that without the flood, and the end of the flood.
func TestFlood(t *testing.T) {
	measure := func(hold string, flood int) (mean, end time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			r := roomOf(t, hold, usual(), usual())
			r.learn(t)
			begun := time.Now()
			var flooded, others sync.WaitGroup
			for i := range flood {
				flooded.Go(func() {
					if _, err := r.ask(t.Context(), Wants{Tenant: 1, Patience: 10 * time.Minute}, &load{tokens: 8000}, uint64(1000+i)); err != nil {
						t.Error(err)
					}
				})
			}
			time.Sleep(time.Second)
			if flood > 0 && hold == HoldAuto {
				if own, other := r.queue.ahead(&Wants{Tenant: 1}, 400), r.queue.ahead(&Wants{Tenant: 2}, 50); own < 45_000 || other > 1000 {
					t.Errorf("%v ms are ahead of the flood's next request, %v of another one", own, other)
				}
			}
			var sum time.Duration
			var mu sync.Mutex
			const requests = 200
			for i := range requests {
				others.Go(func() {
					took, err := r.ask(t.Context(), Wants{Tenant: uint64(2 + i%10)}, &load{tokens: 1000}, uint64(1e6+i))
					mu.Lock()
					defer mu.Unlock()
					if sum += took; err != nil {
						t.Error(err)
					}
				})
				time.Sleep(200 * time.Millisecond)
			}
			others.Wait()
			mean = sum / requests
			flooded.Wait()
			end = time.Since(begun)
		})
		return mean, end
	}
	alone, _ := measure(HoldAuto, 0)
	fair, end := measure(HoldAuto, 300)
	before, endBefore := measure(HoldOff, 300)
	t.Logf("others: %v alone, %v beside the flood, %v without hold; the flood ends after %v, %v without hold", alone, fair, before, end, endBefore)
	if fair > alone+500*time.Millisecond || end > endBefore*21/20 {
		t.Error("one tenant starves the others, or the order costs time")
	}
}

// TestSharesOfTenants has two tenants with weights, both with endless requests, on engines that are held and
// on some that have slots. Some clients leave before the end of their answers.
func TestSharesOfTenants(t *testing.T) {
	class := &queue.Class{Name: "c"}
	for name, v := range map[string]struct {
		leave   bool
		tokens  [2]int64
		clients [2]int
		pins    []int   // the tenants' workers
		weight  float64 // of the second tenant
		ratio   float64 // of what they should get
		within  float64
	}{
		"all stay":                   {false, [2]int64{3000, 3000}, [2]int{40, 40}, nil, 3, 3, 0.05},
		"one tenant's clients leave": {true, [2]int64{3000, 3000}, [2]int{40, 40}, nil, 3, 3, 0.12}, // those are not charged for answers
		"long and short prompts":     {false, [2]int64{2000, 500}, [2]int{60, 240}, nil, 3, 3, 0.1}, // the engine has no attention, and is charged for it
		"one lane each":              {false, [2]int64{2000, 1500}, [2]int{60, 24}, []int{-1, 0}, 1, 1, 0.05},
		"one worker each":            {false, [2]int64{3000, 3000}, [2]int{40, 40}, []int{0, 1}, 3, 1, 0.01},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				engines := []*simulated{usual()}
				if slices.Contains(v.pins, 1) {
					engines = append(engines, usual())
				}
				r := roomOf(t, HoldAuto, engines...)
				r.learn(t)
				var served [2]float64
				var mu sync.Mutex
				begun := time.Now()
				var clients sync.WaitGroup
				for tenant, tokens := range v.tokens {
					for i := range v.clients[tenant] {
						clients.Go(func() {
							for n := 0; time.Since(begun) < 2*time.Minute; n++ {
								l := &load{tokens: tokens}
								own, end := context.WithCancel(t.Context())
								want := Wants{Tenant: uint64(tenant + 1), TenantWeight: 1 + (v.weight-1)*float64(tenant), Class: class, Patience: time.Hour}
								if v.leave && tenant == 0 {
									l.leaves = true
								}
								if tenant < len(v.pins) && v.pins[tenant] >= 0 {
									want.Workers = []uint64{r.offers.Table.Rows[v.pins[tenant]].Worker.ID}
								}
								_, err := r.ask(own, want, l, uint64(1e7*(tenant+1)+1e4*i+n))
								end()
								mu.Lock()
								if at := time.Since(begun); at > 30*time.Second && at < 90*time.Second {
									served[tenant] += float64(tokens)
								}
								if mu.Unlock(); err != nil {
									t.Error(err)
								}
							}
						})
					}
				}
				clients.Wait()
				if ratio := served[1] / served[0]; math.Abs(ratio/v.ratio-1) > v.within {
					t.Errorf("the second tenant got %.2f times of the first, want %v", ratio, v.ratio)
				}
			})
		})
	}
}

// TestOthersOfOtherRouters charges a tenant for requests of another router.
func TestOthersOfOtherRouters(t *testing.T) {
	p, workers, o := limited(t, 1)
	before := p.seatOn(workers[0])
	type got struct {
		tenant uint64
		seat   *Seat
	}
	served := make(chan got, 4)
	class := &queue.Class{Name: "c"}
	for i, tenant := range []uint64{1, 2} {
		go func() {
			want, o, s := anyWorker, o, new(Seat)
			want.Tenant, want.Class = tenant, class
			if _, err := p.Seat(t.Context(), &want, &o, new(chooser), s); err != nil {
				t.Error(err)
			}
			served <- got{tenant, s}
		}()
		for p.Waiting() <= i {
			time.Sleep(time.Millisecond)
		}
	}
	var sel kvscore.Selection
	_, l := p.Scheduler.Select(time.Now(), &kvscore.Request{Remote: true}, p.Scheduler.Refs(workers[0].Target(0)), 0, nil, &sel)
	over := p.queue.paysElsewhere(&journal.Payer{Class: "c", Tenant: 1, Weight: 1}, l)
	if over == nil {
		t.Fatal("nothing was charged")
	}
	before.Leave(true, nil)
	first := <-served
	if first.tenant != 2 {
		t.Errorf("tenant %d got the slot, which has had work elsewhere", first.tenant)
	}
	l.End(true, nil)
	over()
	first.seat.Leave(true, nil)
	(<-served).seat.Leave(true, nil)
}

// TestBackground has endless requests of a background class beside ordinary ones.
func TestBackground(t *testing.T) {
	batch := &queue.Class{Name: "batch", Background: true}
	for _, hold := range []string{HoldOff, HoldAuto} {
		synctest.Test(t, func(t *testing.T) {
			r := roomOf(t, hold, usual(), usual())
			r.learn(t)
			ask := func(n int, class *queue.Class, number int, tokens int64) (sum time.Duration) {
				var mu sync.Mutex
				var clients sync.WaitGroup
				for i := range n {
					clients.Go(func() {
						took, err := r.ask(t.Context(), Wants{Class: class, Patience: 40 * time.Second}, &load{tokens: tokens}, uint64(number+i))
						mu.Lock()
						defer mu.Unlock()
						if sum += took; err != nil {
							t.Error(err)
						}
					})
				}
				clients.Wait()
				return sum / time.Duration(n)
			}
			var batches sync.WaitGroup
			begun, over := time.Now(), time.Duration(0)
			batches.Go(func() {
				ask(600, batch, 1e6, 4000) // 60 s of both engines
				over = time.Since(begun)
			})
			synctest.Wait()
			if n := r.Scheduler.Stats().Leases; n != 2 {
				t.Errorf("%d background requests run at once on two workers", n)
			}
			time.Sleep(time.Second)
			for i := range 10 { // bursts that fill both engines
				// the prefills that run delay them, and each other
				if took := ask(20, nil, 2e6+1000*i, 2000); took > 900*time.Millisecond {
					t.Errorf("hold %s: requests took %v beside a background class", hold, took)
				}
			}
			batches.Wait()
			t.Logf("hold %s: the background class ended after %v", hold, over)
			if over > 80*time.Second+40*time.Second { // with what the others took, and their pauses
				t.Errorf("the background class took %v", over)
			}
		})
	}
}

// TestBackgroundSparesWorkers has endless requests of a background class on four workers, while requests of others come
// here or to another router, and while none do.
func TestBackgroundSparesWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var clients sync.WaitGroup
		defer clients.Wait()
		defer cancel()
		r := roomOf(t, HoldOff, usual(), usual(), usual(), usual())
		batch := &queue.Class{Name: "batch", Background: true}
		for i := range 80 {
			clients.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					_, _ = r.ask(ctx, Wants{Class: batch}, &load{tokens: 4000}, uint64(1e6*i+n)) //nolint:gosec // not negative
				}
			})
		}
		most := func() (n int) { // workers that compute a prompt
			for range 200 {
				time.Sleep(10 * time.Millisecond)
				synctest.Wait()
				busy := 0
				for _, row := range r.offers.Table.Rows {
					if !r.isQuiet(row.Worker, row.Targets[0].Target, time.Now()) {
						busy++
					}
				}
				n = max(n, busy)
			}
			return n
		}
		elsewhere := func(class string) {
			_, l := r.Scheduler.Select(time.Now(), &kvscore.Request{Remote: true}, r.Scheduler.Refs(kvscore.Target{Worker: 99}), 0, nil, new(kvscore.Selection))
			r.queue.paysElsewhere(&journal.Payer{Class: class, Tenant: 1, Weight: 1}, l)
			l.End(true, nil)
		}
		for _, v := range []struct {
			comes string
			do    func()
			most  int
		}{
			{"nothing else", func() {}, 4},
			{"a request of another class", func() { _, _ = r.ask(ctx, Wants{}, &load{tokens: 16}, 9e6) }, 3},
			{"nothing else for a while", func() { time.Sleep(sharedFor) }, 4},
			{"a background request at another router", func() { elsewhere("batch") }, 4},
			{"a request of another class at another router", func() { elsewhere("") }, 3},
		} {
			v.do()
			time.Sleep(time.Second)
			if n := most(); n != v.most {
				t.Errorf("%s: %d workers compute prompts, want %d", v.comes, n, v.most)
			}
		}
	})
}

// TestBackgroundSparesSlots has background requests begin while nothing waits. Others find one of four slots.
func TestBackgroundSparesSlots(t *testing.T) {
	p, workers, o := limited(t, 4)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	want := anyWorker
	want.Class = &queue.Class{Name: "batch", Background: true}
	var seats [4]Seat
	var err error
	for i := 0; i < len(seats) && err == nil; i++ {
		if i == 3 {
			time.AfterFunc(10*time.Millisecond, leave)
		}
		if _, err = p.Seat(ctx, &want, &o, new(chooser), &seats[i]); err == nil {
			seats[i].FirstToken(time.Now())
		}
	}
	if n := running(workers[0]); n != 3 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d have slots, error %v", n, err)
	}
	for i := range seats[:3] {
		seats[i].Leave(true, nil)
	}
}

// TestBackgroundHasTime has a background class wait for longer than others may, and refuses it first.
func TestBackgroundHasTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, workers, o := limited(t, 1)
		before, s := p.seatOn(workers[0]), new(Seat)
		ask := func(class *queue.Class, s *Seat) chan error {
			done := make(chan error, 1)
			go func() {
				o, want := o, anyWorker
				want.Class = class
				_, err := p.Seat(t.Context(), &want, &o, new(chooser), s)
				done <- err
			}()
			synctest.Wait()
			return done
		}
		batch := &queue.Class{Name: "batch", Background: true}
		waits := ask(batch, s)
		if time.Sleep(time.Hour); p.Waiting() != 1 {
			t.Fatal("the request does not wait")
		}
		set := *p.Settings.Load()
		set.MaxWaiting = 1
		p.Settings.Store(&set)
		var other Seat
		got := ask(nil, &other)
		if err := <-waits; !errors.Is(err, ErrQueueFull) {
			t.Errorf("error %v", err)
		}
		before.Leave(true, nil)
		if err := <-got; err != nil {
			t.Error(err)
		}
		other.Leave(true, nil)
	})
}

// TestQueuedIsSeen has many tenants wait for one slot.
func TestQueuedIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, workers, o := limited(t, 1)
		before := p.seatOn(workers[0])
		class := &queue.Class{Name: "c"}
		ctx, leave := context.WithCancel(t.Context())
		var clients sync.WaitGroup
		for i := range 300 {
			clients.Go(func() {
				o, want, s := o, anyWorker, new(Seat)
				want.Class, want.Tenant, want.TenantName = class, uint64(1+i%100), fmt.Sprint("t", i%100) //nolint:gosec // not negative
				if i >= 200 {
					want.Tenant, want.TenantName = 1, "t0"
				}
				if _, err := p.Seat(ctx, &want, &o, new(chooser), s); err == nil {
					s.Leave(true, nil)
				}
			})
		}
		time.Sleep(time.Second)
		classes, tenants := p.Queued(time.Now())
		if len(classes) != 1 || classes[0].Requests != 300 || classes[0].Class != "c" || classes[0].Oldest != 1 {
			t.Errorf("%+v", classes)
		}
		if len(tenants) != mostTenants || tenants[0] != (Queued{"c", "t0", 102, 0, 1}) {
			t.Errorf("%+v", tenants)
		}
		p.queue.mu.Lock()
		p.queue.order.Charge(class, 1, 1, 5000, time.Now())
		p.queue.mu.Unlock()
		want := Wants{Class: class, Tenant: 1, Deadline: time.Now().Add(800 * time.Millisecond)}
		if why := p.WhyWait(&want, time.Now()); !slices.Equal(why, []string{"99 tenants with less service", "deadline in 0.8 s"}) {
			t.Errorf("%q", why)
		}
		leave()
		clients.Wait()
		before.Leave(true, nil)
		if n, _ := workers[0].Running(); n != 0 || p.Waiting() != 0 || len(p.queue.lanes) != 0 {
			t.Errorf("%d slots, %d wait in %d lanes", n, p.Waiting(), len(p.queue.lanes))
		}
	})
}

// TestBackgroundUsesWhatOthersCannot has requests of another class wait for another worker.
func TestBackgroundUsesWhatOthersCannot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, workers, o := limited(t, 1, 1)
		before, s := p.seatOn(workers[0]), new(Seat)
		ctx, leave := context.WithCancel(t.Context())
		var clients sync.WaitGroup
		clients.Go(func() {
			o, want := o, anyWorker
			want.Only = workers[0]
			_, _ = p.Seat(ctx, &want, &o, new(chooser), new(Seat))
		})
		synctest.Wait()
		want := anyWorker
		want.Class = &queue.Class{Name: "batch", Background: true}
		waited, err := p.Seat(ctx, &want, &o, new(chooser), s)
		if err != nil || waited > 0 || s.Worker != workers[1] {
			t.Errorf("error %v after %v", err, waited)
		}
		leave()
		clients.Wait()
		s.Leave(true, nil)
		before.Leave(true, nil)
	})
}
