package pool

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Errors of Pool.Seat.
var (
	ErrNoWorker         = errors.New("no worker is available")
	ErrQueueFull        = errors.New("all workers and the queue are full")
	ErrWaited           = errors.New("all workers are full, and none had a free slot in time")
	ErrWaitedForSession = errors.New("the session's worker is full, and had no free slot in time")
)

// waiters are the requests that wait for a worker, in the order of package queue. A free slot, or room,
// goes to the first request that can use it. Requests with equal needs wait in one lane, and the queue
// judges workers once for each lane.
type waiters struct {
	workers *registry
	length  atomic.Int32 // number of waiters; readable without the lock
	others  atomic.Int32 // those of no background class

	mu    sync.Mutex
	order queue.Queue
	lanes map[string]*lane // by needs
	holds
	classes map[string]*queue.Class // by name, those that have waited
}

// reviewEvery is the time between two reviews of all lanes. A worker may recover, or get another model,
// while no slot becomes free.
const reviewEvery = 250 * time.Millisecond

const (
	incidentFull  = "all workers are full, and requests wait"
	incidentEmpty = "there are no upstreams, and requests wait"
)

// wait queues a request until the queue grants it a slot of a worker, for at most the time given. It
// returns how long the request waited, and leaves the offers of then in o. The grant has no worker if the
// request must choose again. The errors are ErrQueueFull, ErrWaited and the context's.
func (q *waiters) wait(
	ctx context.Context, want *Wants, o *Offers, at place, most time.Duration, renew func() (Offers, bool),
) (v grant, waited time.Duration, err error) {
	m := &waiter{want: *want, offers: *o, at: at, since: time.Now(), verdict: make(chan grant, 1), renew: renew}
	if at.work == 0 { // nothing was chosen
		m.at.work = q.workers.Scheduler.Work(want.Prompt)
	}
	defer func() { *o = m.offers }()
	if q.enter(m, q.workers.Settings.Load().MaxWaiting) {
		switch {
		case len(o.Ups) == 0:
			q.workers.Raise(m.since, incidentEmpty)
		case q.isFull(o):
			q.workers.Raise(m.since, incidentFull)
		}
		v = q.outcome(ctx, m, most)
		waited = time.Since(m.since)
	} else {
		v = <-m.verdict
	}
	if ctx.Err() != nil {
		q.giveBack(&v)
		return grant{}, waited, ctx.Err()
	}
	return v, waited, v.err
}

// outcome waits for the waiter's verdict.
func (q *waiters) outcome(ctx context.Context, m *waiter, most time.Duration) grant {
	over := time.After(most)
	if m.want.isBackground() {
		over = nil // it has time
	}
	var tick <-chan time.Time
	if m.renew != nil {
		tick = time.Tick(reviewEvery)
	}
	for {
		select {
		case v := <-m.verdict:
			return v
		case <-tick:
			o, _ := m.renew()
			q.renew(m, o)
			continue
		case <-over:
			if over = nil; !m.want.isOverdue() && q.letGo(m) {
				continue
			}
		case <-ctx.Done():
		}
		return q.atLast(m)
	}
}

// renew gives a waiter other offers.
func (q *waiters) renew(m *waiter, o Offers) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if was := m.offers.Ups; !m.out && (len(was) != len(o.Ups) || len(was) > 0 && was[0] != o.Ups[0]) { // another list
		q.remove(m)
		m.offers = o
		t := q.look()
		q.push(m, t)
		q.place(m.lane, t)
	}
}

// enter queues a request and returns whether it has to wait. If more than most requests wait, the queue
// refuses one.
func (q *waiters) enter(m *waiter, most int) (waits bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.look()
	q.push(m, t)
	q.place(m.lane, t)
	if q.order.Len() > most && !q.letFirst(nil, t) {
		last := q.order.Last().Value.(*waiter) //nolint:forcetypeassert,errcheck // it has no other values
		v := grant{err: ErrQueueFull}
		if !last.want.isPromised() {
			v = last.takeWorse(t, v.err)
		}
		q.decide(last, v)
	}
	return !m.out
}

// letGo lets the first of a waiter's lane go, because the waiter's time is up. So a tenant's surplus does not
// pass those before it. It returns false if the lane is not held for room.
func (q *waiters) letGo(m *waiter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return m.out || q.letFirst(m.lane, time.Now())
}

// letFirst sends the first held request of a lane to an engine without room, or of all if it is nil. If the queue is full,
// no request goes that its class refuses or demotes when it is late.
func (q *waiters) letFirst(only *lane, t time.Time) bool {
	f := q.first(func(l *lane, _ kvscore.Room) bool { return (only == nil || l == only) && !l.background && l.isHeld(t) }, true, t)
	if f == nil || only == nil && f.want.isPromised() {
		return false
	}
	q.decide(f, f.takeWorse(t, ErrWaited))
	return true
}

// push adds a waiter to its lane, and to the order. The caller holds the lock.
func (q *waiters) push(m *waiter, t time.Time) {
	key := m.needs()
	l := q.lanes[key]
	if l == nil {
		if q.lanes == nil {
			q.lanes = make(map[string]*lane)
		}
		l = &lane{key: key, want: m.want, offers: m.offers, follows: m.renew != nil, background: m.want.isBackground()}
		l.refresh(q.workers)
		q.lanes[key] = l
		q.order.Parallel = max(1, len(l.offers.Ups))
	}
	l.length++
	m.lane = l
	q.know(m.want.Class)
	tier := m.want.Tier
	if m.want.Rest {
		tier = math.MinInt // its client has a part of the answer
	}
	m.entry = queue.Entry{
		Class: m.want.Class, Tenant: m.want.Tenant, Weight: m.want.TenantWeight, Tier: tier,
		Arrival: m.want.Arrival, Deadline: m.want.Deadline, Cost: m.at.time, Surplus: kvscore.RoomForSurplus(m.tokens()), Lane: l, Value: m,
	}
	q.order.Push(&m.entry, t)
	q.length.Add(1)
	if !l.background {
		q.others.Add(1)
	}
}

// remove takes a waiter out of its lane and the order. The caller holds the lock.
func (q *waiters) remove(m *waiter) {
	q.length.Add(-1)
	if !m.lane.background {
		q.others.Add(-1)
	}
	q.order.Remove(&m.entry)
	if m.lane.length--; m.lane.length == 0 {
		delete(q.lanes, m.lane.key)
	}
}

// atLast removes a waiter whose time is up, or whose client has left. It may get a worker that
// is marked down, or has no room.
func (q *waiters) atLast(m *waiter) grant {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !m.out {
		q.decide(m, m.takeWorse(time.Now(), ErrWaited))
	}
	return <-m.verdict
}

// freed gives what is free of a worker to waiters. It takes no lock if the queue is empty, because a
// request looks at the slots only after length counts it.
func (q *waiters) freed(w *worker.Worker) {
	if q.length.Load() == 0 {
		return
	}
	if now := q.workers.Known(w.Dial); now != nil {
		w = now // it may have got another id
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.look()
	for q.give(w, t) {
		continue // more than one slot may be free
	}
}

// takeUnclaimed takes a slot of a worker unless a queued request has first claim, or others must find it. A request
// that is held must not pass those that wait for more room, if its tenant has had more service.
func (q *waiters) takeUnclaimed(w *worker.Worker, want *Wants, held bool) bool {
	background := want.isBackground()
	if background && !hasSpareSlots(w) {
		return false
	}
	if q.length.Load() > 0 {
		q.mu.Lock()
		defer q.mu.Unlock()
		t := q.look()
		if q.first(func(l *lane, room kvscore.Room) bool {
			return (background || !l.background) && q.hasRoom(l, w, room, t)
		}, false, t) != nil {
			return false
		}
		if held && !q.order.MayPass(want.Class, want.Tenant, want.Tier, func(key any) bool {
			l, ok := key.(*lane)
			return ok && q.hasRoom(l, w, kvscore.SomeRoom, t)
		}) {
			return false
		}
	}
	return w.TakeSlot()
}

// reviewAll reviews all lanes: after a change of settings, and every reviewEvery. It evaluates again
// which workers may serve each lane, and gives them what is free.
func (q *waiters) reviewAll() {
	if q.length.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.look()
	for _, l := range q.lanes {
		l.refresh(q.workers)
	}
	q.place(nil, t)
}

// place gives what is free to the waiters of a lane, or of all if it is nil, in order. The caller holds
// the lock.
func (q *waiters) place(only *lane, t time.Time) {
	var refused []*worker.Worker // no waiter may use them now
	for {
		m := q.first(func(l *lane, room kvscore.Room) bool {
			return (only == nil || l == only) && q.isReady(l, room, t, refused)
		}, true, t)
		switch {
		case m == nil:
			return
		case m.lane.free == nil: // there is nothing to wait for
			q.decide(m, grant{})
		case q.give(m.lane.free, t):
			refused = refused[:0] // others may use them now
		default:
			refused = append(refused, m.lane.free)
		}
	}
}

// give gives a free slot of a worker to the first waiter that can use it. It returns false if there is no
// such slot or waiter. The caller holds the lock.
func (q *waiters) give(w *worker.Worker, t time.Time) bool {
	if w.IsFull() {
		return false
	}
	m := q.first(func(l *lane, room kvscore.Room) bool { return q.hasRoom(l, w, room, t) }, false, t)
	if m == nil || !w.TakeSlot() {
		return false
	}
	q.decide(m, q.promise(m, w, q.roomsFor(m.lane, w, t)))
	return true
}

// hasRoom returns whether a lane can use a free slot of a worker with some room. The caller holds the lock.
func (q *waiters) hasRoom(l *lane, w *worker.Worker, room kvscore.Room, t time.Time) bool {
	return l.rankIn(q.roomsFor(l, w, t), room) >= 0 && l.canUse(w, t) && q.workers.spares(&l.want, l.offers, t)
}

// first returns the first waiter of some lanes; nil if there is none. Lanes are apart if they may use different
// workers. The caller holds the lock.
func (q *waiters) first(may func(l *lane, room kvscore.Room) bool, apart bool, t time.Time) *waiter {
	e := q.order.First(func(key any, room kvscore.Room) bool {
		l, ok := key.(*lane)
		return ok && may(l, room)
	}, apart, t)
	if e == nil {
		return nil
	}
	return e.Value.(*waiter) //nolint:forcetypeassert,errcheck // it has no other values
}

// decide removes a waiter and sends its verdict. The caller holds the lock.
func (q *waiters) decide(m *waiter, v grant) {
	if v.worker != nil {
		v.bill = q.charge(&m.want, m.at.work)
	}
	q.workers.heed(&m.want, time.Now())
	q.remove(m)
	m.out = true
	m.verdict <- v
}

// waiter is one request in the queue.
type waiter struct {
	want   Wants
	offers Offers
	at     place
	renew  func() (Offers, bool) // see Chooser; nil if the source does not follow its upstreams

	since   time.Time // when it came to the queue
	lane    *lane
	entry   queue.Entry
	verdict chan grant // gets one grant when the waiter leaves the queue
	out     bool       // it has left the queue
}

// grant says how a wait ended. Without a worker or an error there is no worker to wait for, and the request
// chooses again.
type grant struct {
	worker *worker.Worker // the queue has taken a slot of it for the request
	only   bool           // the request must not choose another worker
	rank   int            // where tokens are
	tokens int64          // promised there: see kvscore.Scheduler.Promise
	bill   bill
	err    error // too many requests wait, or this one waited too long
}

// takeWorse takes a slot for a waiter that the queue would otherwise refuse. The worker may be marked
// down or have no room, but is neither hung nor draining. If there is none, the grant has the error.
func (m *waiter) takeWorse(t time.Time, otherwise error) grant {
	if m.lane.background || m.want.isOverdue() {
		return grant{err: otherwise} // only what others leave; or it is refused or demoted
	}
	w := m.lane.leastBusy(t, func(w *worker.Worker, v Verdict) bool { return v <= MarkedDown && !w.IsHung() })
	if w == nil || !w.TakeSlot() {
		return grant{err: otherwise}
	}
	return grant{worker: w}
}

// giveBack gives back what the queue has granted.
func (q *waiters) giveBack(v *grant) {
	if v.worker != nil {
		q.booked(v)
		q.settle(&v.bill, 0)
		q.free(v.worker)
	}
	*v = grant{}
}

// isFull returns whether all offered workers are at their limits.
func (q *waiters) isFull(o *Offers) bool {
	return !slices.ContainsFunc(o.Table.Rows, func(row TableRow) bool { return !row.Worker.IsFull() })
}

func running(w *worker.Worker) int64 {
	n, _ := w.Running()
	return n
}

// free frees a slot of a worker for the queue.
func (q *waiters) free(w *worker.Worker) {
	w.FreeSlot()
	q.freed(w)
}
