package pool

import (
	"cmp"
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// queue is the requests that wait for a worker with room, in order. A free slot goes to
// the first request that can use it.
type queue struct {
	pool   *Pool
	Length atomic.Int32 // number of waiters; readable without the lock

	mu        sync.Mutex
	waiting   []*waiter // in order
	entered   uint64
	reviewing bool // reviewUntilEmpty runs
	rate      serviceRate
}

// reviewEvery is the time between two reviews of all waiters. A worker may recover, or
// get another model, while no slot becomes free.
const reviewEvery = 250 * time.Millisecond

const incidentFull = "all workers are full, requests wait"

// Wait queues a request until the queue grants it a slot of a worker, for at most the
// time given. It returns how long the request waited.
func (p *Pool) Wait(ctx context.Context, want Wants, o Offers, most time.Duration) (v Grant, waited time.Duration) {
	m := &waiter{want: want, offers: o, verdict: make(chan Grant, 1)}
	if !p.Queue.enter(m, p.Settings.Load().MaxWaiting) {
		return <-m.verdict, 0
	}
	began := time.Now()
	p.Incidents.Raise(began, incidentFull, p.Logger)
	v = p.Queue.outcome(ctx, m, most)
	return v, time.Since(began)
}

// outcome waits for the waiter's verdict.
func (q *queue) outcome(ctx context.Context, m *waiter, most time.Duration) Grant {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case v := <-m.verdict:
		return v
	case <-timer.C:
		return q.atLast(m)
	case <-ctx.Done():
		if q.leave(m) {
			return Grant{Late: true}
		}
		return <-m.verdict
	}
}

// enter queues a request and returns whether it has to wait. If more than most requests
// wait, the queue refuses the last one. The order is by arrival, so a retry keeps its place.
func (q *queue) enter(m *waiter, most int) (waits bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := time.Now()
	q.entered++
	m.number = q.entered
	q.refresh(m)
	i, _ := slices.BinarySearchFunc(q.waiting, m, (*waiter).compare)
	q.waiting = slices.Insert(q.waiting, i, m)
	q.count(t, 1)
	q.place(m, t)
	if len(q.waiting) > most {
		last := q.waiting[len(q.waiting)-1]
		w := last.takeWorse()
		q.decide(last, Grant{Worker: w, Full: w == nil}, t)
	}
	m.waits = !m.out
	if m.waits && !q.reviewing {
		q.reviewing = true
		go q.reviewUntilEmpty()
	}
	return m.waits
}

// atLast removes a waiter whose time is up. It may get a worker that is marked down.
func (q *queue) atLast(m *waiter) Grant {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !m.out {
		w := m.takeWorse()
		q.decide(m, Grant{Worker: w, Late: w == nil}, time.Now())
	}
	return <-m.verdict
}

// leave removes a waiter. It returns false if the waiter already has its verdict.
func (q *queue) leave(m *waiter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if m.out {
		return false
	}
	q.remove(m, time.Now())
	return true
}

// freed gives the free slots of a worker to waiters. It takes no lock if the queue is
// empty, because a request looks at the slots only after Length counts it.
func (q *queue) freed(w *Worker) {
	if q.Length.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for t := time.Now(); q.give(w, t); {
		continue // more than one slot may be free
	}
}

// TakeUnclaimed takes a slot of a worker unless a queued request has first claim.
func (q *queue) TakeUnclaimed(w *Worker) bool {
	if q.Length.Load() > 0 {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.firstFor(w, time.Now()) != nil {
			return false
		}
	}
	return w.Slots.Take()
}

// reviewAll reviews all waiters after a change of settings.
func (q *queue) reviewAll() {
	if q.Length.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.review(time.Now())
}

// reviewUntilEmpty reviews all waiters every reviewEvery until there are none.
func (q *queue) reviewUntilEmpty() {
	ticker := time.NewTicker(reviewEvery)
	defer ticker.Stop()
	for more := true; more; {
		<-ticker.C
		q.mu.Lock()
		q.review(time.Now())
		more = len(q.waiting) > 0
		q.reviewing = more
		q.mu.Unlock()
	}
}

// review evaluates again which workers may serve each waiter, and gives them free slots in
// their order. The caller holds the lock.
func (q *queue) review(t time.Time) {
	for _, m := range q.waiting {
		q.refresh(m)
	}
	for _, m := range slices.Clone(q.waiting) {
		q.place(m, t)
	}
}

// refresh evaluates which workers may serve a waiter. The caller holds the lock.
func (q *queue) refresh(m *waiter) {
	m.eligible = q.pool.eligible(m.eligible[:0], &m.want, m.offers)
}

// place gives a waiter a free slot that no earlier waiter can use. The caller holds the
// lock.
func (q *queue) place(m *waiter, t time.Time) {
	for !m.out {
		r, some := m.resort(t)
		if !some {
			q.decide(m, Grant{}, t)
			return
		}
		w := m.leastBusy(func(s offer) bool { return s.allowed(r, t) })
		if w == nil || !q.give(w, t) {
			return
		}
	}
}

// give gives a free slot of a worker to the first waiter that can use it. It returns false
// if there is no such slot or waiter. The caller holds the lock.
func (q *queue) give(w *Worker, t time.Time) bool {
	if w.Slots.full() {
		return false
	}
	m := q.firstFor(w, t)
	if m == nil || !w.Slots.Take() {
		return false
	}
	q.decide(m, Grant{Worker: w}, t)
	return true
}

// firstFor returns the first waiter that can use a slot of a worker; nil if there is none.
// The caller holds the lock.
func (q *queue) firstFor(w *Worker, t time.Time) *waiter {
	if i := slices.IndexFunc(q.waiting, func(m *waiter) bool { return m.canUse(w, t) }); i >= 0 {
		return q.waiting[i]
	}
	return nil
}

// decide removes a waiter and sends its verdict. The caller holds the lock.
func (q *queue) decide(m *waiter, v Grant, t time.Time) {
	q.remove(m, t)
	if m.waits && v.Worker != nil {
		q.rate.served++
	}
	m.verdict <- v
}

// remove removes a waiter. The caller holds the lock.
func (q *queue) remove(m *waiter, t time.Time) {
	i, _ := slices.BinarySearchFunc(q.waiting, m, (*waiter).compare)
	q.waiting = slices.Delete(q.waiting, i, i+1)
	m.out = true
	q.count(t, -1)
}

// count counts the waiters, and for how long there were any. The caller holds the lock.
func (q *queue) count(t time.Time, more int32) {
	q.rate.pass(t, q.Length.Load() > 0)
	q.Length.Add(more)
}

// waiter is one request in the queue.
type waiter struct {
	want   Wants
	offers Offers
	number uint64 // in the order of entering

	eligible []offer    // the workers that may serve the request now
	verdict  chan Grant // gets one Grant when the waiter leaves the queue
	waits    bool       // the queue did not serve it at once
	out      bool       // it has left the queue
}

// Grant says how a wait ended. The zero Grant says that there is no worker to wait for;
// the request then chooses again.
type Grant struct {
	Worker *Worker // the queue has taken a slot of it for the request
	Full   bool    // too many requests wait
	Late   bool    // the request waited too long, or the client left
}

func (m *waiter) compare(o *waiter) int {
	return cmp.Or(cmp.Compare(m.want.Tier, o.want.Tier), m.want.Arrival.Compare(o.want.Arrival), cmp.Compare(m.number, o.number))
}

// resort returns the first resort at which a worker may serve the waiter, full or not. some
// is false if there is none.
func (m *waiter) resort(t time.Time) (r Resort, some bool) {
	for _, r := range resorts {
		for _, s := range m.eligible {
			if s.allowed(r, t) {
				return r, true
			}
		}
	}
	return Resort{}, false
}

// leastBusy returns the least busy worker with room that mayUse accepts; nil if there is
// none.
func (m *waiter) leastBusy(mayUse func(offer) bool) (least *Worker) {
	for _, s := range m.eligible {
		if mayUse(s) && !s.worker.Slots.full() &&
			(least == nil || s.worker.Slots.Running.Load() < least.Slots.Running.Load()) {
			least = s.worker
		}
	}
	return least
}

// takeWorse takes a slot for a waiter that the queue would otherwise refuse. The worker may
// be marked down, but neither hung nor draining. It returns nil if there is none.
func (m *waiter) takeWorse() *Worker {
	w := m.leastBusy(func(s offer) bool {
		return Available(s.up) && !s.worker.Draining() && !s.worker.Progress.IsHung()
	})
	if w == nil || !w.Slots.Take() {
		return nil
	}
	return w
}

// canUse returns whether the waiter can use a slot of the worker.
func (m *waiter) canUse(w *Worker, t time.Time) bool {
	i := slices.IndexFunc(m.eligible, func(s offer) bool { return s.worker == w })
	if i < 0 {
		return false
	}
	r, some := m.resort(t)
	return some && m.eligible[i].allowed(r, t)
}

// serviceRate is how fast workers served waiters while there were any.
type serviceRate struct {
	served float64 // decayed to at
	busy   float64 // seconds with waiters, decayed to at
	at     time.Time
}

// rateMemory is the time with waiters in which older counts decay to a third.
const rateMemory = 10 * time.Second

// pass advances the rate to t. waited says that requests waited meanwhile.
func (r *serviceRate) pass(t time.Time, waited bool) {
	if d := t.Sub(r.at); waited && d > 0 {
		keep := math.Exp(-float64(d) / float64(rateMemory))
		r.served *= keep
		r.busy = r.busy*keep + d.Seconds()
	}
	r.at = t
}

// Bounds of Retry-After, in seconds.
const minRetryAfter, maxRetryAfter = 1, 60

// RetryAfter returns the seconds in which workers will have served the present waiters, or
// unknown if the rate is not known.
func (q *queue) RetryAfter(unknown time.Duration) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.count(time.Now(), 0)
	seconds := unknown.Seconds()
	if r := q.rate; r.served > 0 && r.busy > 0 {
		seconds = float64(q.Length.Load()+1) * r.busy / r.served
	}
	return int(min(max(math.Ceil(seconds), minRetryAfter), maxRetryAfter))
}
