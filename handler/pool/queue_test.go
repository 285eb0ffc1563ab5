package pool

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// queueRoom is a queue before workers with the given limits.
func queueRoom(limits ...int) (*waiters, []*worker.Worker) {
	p := &Pool{registry: &registry{workers: make(map[string]*worker.Worker), Scheduler: kvscore.NewScheduler(kvscore.Settings{})}}
	p.Settings.Store(wanted().WithDefaults())
	p.queue.workers = p.registry
	workers := make([]*worker.Worker, len(limits))
	for i, n := range limits {
		workers[i] = worker.New("test", worker.Settings{Dial: fmt.Sprint(i), ID: uint64(i + 1), MaxRunning: worker.RequestLimit(n)})
		p.workers[workers[i].Dial] = workers[i]
	}
	return &p.queue, workers
}

// newWaiter is one that any of the workers may serve.
func newWaiter(arrival time.Time, workers ...*worker.Worker) *waiter {
	o := Offers{Table: new(Table)}
	for _, w := range workers {
		o.Ups = append(o.Ups, new(reverseproxy.Upstream))
		o.Table.Rows = append(o.Table.Rows, TableRow{Worker: w})
	}
	return &waiter{want: Wants{Rank: AnyRank, Kind: worker.KindPlain, Arrival: arrival}, offers: o, verdict: make(chan grant, 1)}
}

// decided returns the verdict, if there is one.
func (m *waiter) decided() (grant, bool) {
	select {
	case v := <-m.verdict:
		return v, true
	default:
		return grant{}, false
	}
}

// plainQueue is what a queue is to do, written for clarity alone: after each
// event all waiters are looked at in their order.
type plainQueue struct {
	waiting []*waiter
	running map[*worker.Worker]int
	allowed map[*waiter][]*worker.Worker
	got     map[*waiter]grant
}

func (p *plainQueue) look() {
	slices.SortStableFunc(p.waiting, func(a, b *waiter) int {
		return cmp.Or(cmp.Compare(a.want.Tier, b.want.Tier), a.want.Arrival.Compare(b.want.Arrival))
	})
	var rest []*waiter
	for _, m := range p.waiting {
		if v, ok := p.serve(m); ok {
			p.got[m] = v
		} else {
			rest = append(rest, m)
		}
	}
	p.waiting = rest
}

func (p *plainQueue) serve(m *waiter) (grant, bool) {
	var there []*worker.Worker // those that are not drained, else all
	for _, w := range p.allowed[m] {
		if !w.Draining() {
			there = append(there, w)
		}
	}
	if there == nil {
		there = p.allowed[m]
	}
	var best *worker.Worker
	for _, w := range there {
		_, most := w.Running()
		limit := int(most)
		if (limit == 0 || p.running[w] < limit) && (best == nil || p.running[w] < p.running[best]) {
			best = w
		}
	}
	if best != nil {
		p.running[best]++
	}
	return grant{worker: best, only: best != nil}, best != nil || len(there) == 0
}

// TestQueueDoesWhatAPlainOneDoes applies random events to a queue and to its model. Both must
// grant the same workers to the same requests in the same order.
func TestQueueDoesWhatAPlainOneDoes(t *testing.T) {
	served, refused := 0, 0
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			q, workers := queueRoom(2, 1, 3, 2)
			p := &plainQueue{running: map[*worker.Worker]int{}, allowed: map[*waiter][]*worker.Worker{}, got: map[*waiter]grant{}}
			begun := time.Now()
			const most = 12
			for step := range 3000 {
				var m *waiter
				switch op := rng.IntN(20); {
				case op < 8: // somebody comes, now and then for the second time
					arrival := begun.Add(time.Duration(step) * time.Second)
					if rng.IntN(5) == 0 {
						arrival = begun.Add(time.Duration(rng.IntN(step+1)) * time.Second)
					}
					var allowed []*worker.Worker
					for _, w := range workers {
						if rng.IntN(2) == 0 {
							allowed = append(allowed, w)
						}
					}
					m = newWaiter(arrival, allowed...)
					m.want.Tier = -(rng.IntN(4) / 3) // most are of one tier
					q.enter(m, most)
					p.allowed[m] = allowed
					p.waiting = append(p.waiting, m)
				case op < 16: // an attempt ends
					w := workers[rng.IntN(len(workers))]
					if p.running[w] == 0 {
						continue
					}
					p.running[w]--
					w.FreeSlot()
					q.freed(w)
				case op < 18: // a client leaves
					if len(p.waiting) == 0 {
						continue
					}
					i := rng.IntN(len(p.waiting))
					if v := q.atLast(p.waiting[i]); !errors.Is(v.err, ErrWaited) {
						t.Fatal("one that waits has left before")
					}
					p.waiting = slices.Delete(p.waiting, i, i+1)
				case op < 19: // the operator changes a limit
					workers[rng.IntN(len(workers))].LimitSlots(worker.RequestLimit(rng.IntN(5)))
					q.reviewAll()
				default: // or drains a worker, or ends that
					w := workers[rng.IntN(len(workers))]
					w.AskDrain(!w.Draining())
					q.reviewAll()
				}
				p.look()
				if len(p.waiting) > most {
					last := p.waiting[most]
					p.got[last] = grant{err: ErrQueueFull}
					p.waiting = p.waiting[:most]
				}
				for m, want := range p.got {
					got, ok := m.decided()
					if got.bill = (bill{}); !ok || got != want {
						t.Fatalf("seed %d, step %d: got %+v (%v), want %+v", seed, step, got, ok, want)
					}
					if got.err != nil {
						refused++
					} else if got.worker != nil {
						served++
					}
				}
				clear(p.got)
				for _, m := range p.waiting {
					if v, ok := m.decided(); ok {
						t.Fatalf("seed %d, step %d: %+v, and the plain queue lets it wait", seed, step, v)
					}
				}
				if n := int(q.length.Load()); n != len(p.waiting) {
					t.Fatalf("seed %d, step %d: length %d, want %d", seed, step, n, len(p.waiting))
				}
				for i, w := range workers {
					if n := int(running(w)); n != p.running[w] {
						t.Fatalf("seed %d, step %d: worker %d has %d, want %d", seed, step, i, n, p.running[w])
					}
				}
			}
			for _, m := range p.waiting {
				q.atLast(m)
			}
		})
	}
	if served == 0 || refused == 0 {
		t.Errorf("%d served, %d refused: the test shows nothing", served, refused)
	}
}

// BenchmarkFreedSlot frees a slot while many wait: the first of them for it, or all but the last for
// another worker. With names, each is a tenant.
func BenchmarkFreedSlot(b *testing.B) {
	for _, n := range []int{10, 1000, 10_000} {
		for _, unfit := range []int{0, n - 1} {
			for _, tenants := range []bool{false, true} {
				b.Run(fmt.Sprintf("waiting=%d/unfit=%d/tenants=%v", n, unfit, tenants), func(b *testing.B) {
					q, workers := queueRoom(slices.Repeat([]int{1}, 16)...)
					for _, w := range workers {
						w.TakeSlot()
					}
					fit, others := newWaiter(time.Now(), workers[:8]...).offers, newWaiter(time.Now(), workers[8:]...).offers
					next := func(i int, o Offers) *waiter {
						m := newWaiter(time.Now())
						if m.offers = o; tenants {
							m.want.Tenant = uint64(i) //nolint:gosec // not negative
						}
						return m
					}
					for i := range n {
						if i < unfit {
							q.enter(next(i, others), n+1)
						} else {
							q.enter(next(i, fit), n+1)
						}
					}
					b.ReportAllocs()
					i := 0
					for b.Loop() {
						w := workers[i%8]
						w.FreeSlot()
						q.freed(w)
						q.enter(next(i, fit), n+1)
						i++
					}
				})
			}
		}
	}
}

// TestRepeatedUpstreamWaits has a full worker with two upstreams. The first one is not
// available. Without a wait, the request would choose again and again.
func TestRepeatedUpstreamWaits(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1", MaxRunning: 1}))
	list := reverseproxy.UpstreamPool{{Dial: "a:1", Host: new(reverseproxy.Host)}, {Dial: "a:1", Host: new(reverseproxy.Host)}}
	// Caddy's active health checks set this field, and nothing else can.
	unhealthy := reflect.ValueOf(list[0]).Elem().FieldByName("unhealthy").Addr().UnsafePointer()
	(*atomic.Int32)(unhealthy).Store(1)
	o := p.Peek(list, nil)
	w := o.Table.Rows[0].Worker
	if !w.TakeSlot() {
		t.Fatal("the worker has no slot")
	}
	m := newWaiter(time.Now())
	m.offers = o
	if !p.queue.enter(m, 10) {
		t.Fatal("the request does not wait")
	}
	p.queue.free(w)
	if v, ok := m.decided(); !ok || v.worker != w {
		t.Errorf("got %v, %v, want the slot of the worker", v, ok)
	}
}
