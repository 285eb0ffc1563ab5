package pool

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// Errors of Pool.Seat.
var (
	ErrNoWorker   = errors.New("no worker is available")
	ErrQueueFull  = errors.New("all workers and the queue are full")
	ErrWaited     = errors.New("all workers are full, and none had a free slot in time")
	ErrHomeWaited = errors.New("the session's worker is full, and had no free slot in time")
)

// waiters are the requests that wait for a worker with room, in order. A free slot goes to
// the first request that can use it.
type waiters struct {
	workers *registry
	length  atomic.Int32 // number of waiters; readable without the lock

	mu      sync.Mutex
	waiting []*waiter // in order
	entered uint64
}

// reviewEvery is the time between two reviews of all waiters. A worker may recover, or
// get another model, while no slot becomes free.
const reviewEvery = 250 * time.Millisecond

const (
	incidentFull  = "all workers are full, and requests wait"
	incidentEmpty = "there are no upstreams, and requests wait"
)

// wait queues a request until the queue grants it a slot of a worker, for at most the time
// given. It returns how long the request waited, and leaves the offers of then in o. The worker is
// nil if there is none to wait for; the request then chooses again. The errors are ErrQueueFull,
// ErrWaited and the context's.
func (q *waiters) wait(
	ctx context.Context, want *Wants, o *Offers, most time.Duration, renew func() (Offers, bool),
) (w *worker.Worker, waited time.Duration, err error) {
	m := &waiter{want: *want, offers: *o, verdict: make(chan grant, 1), renew: renew}
	defer func() { *o = m.offers }()
	var v grant
	if q.enter(m, q.workers.Settings.Load().MaxWaiting) {
		began := time.Now()
		incident := incidentFull
		if len(o.Ups) == 0 {
			incident = incidentEmpty
		}
		q.workers.Incidents.Raise(began, incident, q.workers.Logger)
		v = q.outcome(ctx, m, most)
		waited = time.Since(began)
	} else {
		v = <-m.verdict
	}
	if ctx.Err() != nil {
		if v.worker != nil {
			q.free(v.worker)
		}
		return nil, waited, ctx.Err()
	}
	return v.worker, waited, v.err
}

// outcome waits for the waiter's verdict.
func (q *waiters) outcome(ctx context.Context, m *waiter, most time.Duration) grant {
	over := time.After(most)
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
		m.offers = o
		q.refresh(m)
		q.place(m, time.Now())
	}
}

// enter queues a request and returns whether it has to wait. If more than most requests
// wait, the queue refuses the last one. The order is by arrival, so a retry keeps its place.
func (q *waiters) enter(m *waiter, most int) (waits bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := time.Now()
	q.entered++
	m.number = q.entered
	q.refresh(m)
	i, _ := slices.BinarySearchFunc(q.waiting, m, (*waiter).compare)
	q.waiting = slices.Insert(q.waiting, i, m)
	q.length.Add(1)
	q.place(m, t)
	if len(q.waiting) > most {
		last := q.waiting[len(q.waiting)-1]
		q.decide(last, last.takeWorse(t, ErrQueueFull))
	}
	return !m.out
}

// atLast removes a waiter whose time is up, or whose client has left. It may get a worker that
// is marked down.
func (q *waiters) atLast(m *waiter) grant {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !m.out {
		q.decide(m, m.takeWorse(time.Now(), ErrWaited))
	}
	return <-m.verdict
}

// freed gives the free slots of a worker to waiters. It takes no lock if the queue is
// empty, because a request looks at the slots only after length counts it.
func (q *waiters) freed(w *worker.Worker) {
	if q.length.Load() == 0 {
		return
	}
	if now := q.workers.Known(w.Dial); now != nil {
		w = now // it may have got another id
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for t := time.Now(); q.give(w, t); {
		continue // more than one slot may be free
	}
}

// takeUnclaimed takes a slot of a worker unless a queued request has first claim.
func (q *waiters) takeUnclaimed(w *worker.Worker) bool {
	if q.length.Load() > 0 {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.firstFor(w, time.Now()) != nil {
			return false
		}
	}
	return w.TakeSlot()
}

// reviewAll reviews all waiters: after a change of settings, and every reviewEvery.
func (q *waiters) reviewAll() {
	if q.length.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.review(time.Now())
}

// review evaluates again which workers may serve each waiter, and gives them free slots in
// their order. The caller holds the lock.
func (q *waiters) review(t time.Time) {
	for _, m := range q.waiting {
		q.refresh(m)
	}
	for _, m := range slices.Clone(q.waiting) {
		q.place(m, t)
	}
}

// refresh finds out again which models are served, and which workers are at the offered
// addresses. The caller holds the lock.
func (q *waiters) refresh(m *waiter) {
	m.offers = q.workers.renewed(m.offers)
	m.judge = q.workers.judgment(&m.want, m.offers, time.Time{})
}

// place gives a waiter a free slot that no earlier waiter can use. The caller holds the
// lock.
func (q *waiters) place(m *waiter, t time.Time) {
	if m.renew != nil && len(m.offers.Ups) == 0 {
		return // it waits for offers
	}
	for !m.out {
		best := m.best(t)
		if !best.Possible() {
			q.decide(m, grant{})
			return
		}
		w := m.leastBusy(t, func(w *worker.Worker, v Verdict) bool { return v.tier() == best })
		if w == nil || !q.give(w, t) {
			return
		}
	}
}

// give gives a free slot of a worker to the first waiter that can use it. It returns false
// if there is no such slot or waiter. The caller holds the lock.
func (q *waiters) give(w *worker.Worker, t time.Time) bool {
	if w.IsFull() {
		return false
	}
	m := q.firstFor(w, t)
	if m == nil || !w.TakeSlot() {
		return false
	}
	q.decide(m, grant{worker: w})
	return true
}

// firstFor returns the first waiter that can use a slot of a worker; nil if there is none.
// The caller holds the lock.
func (q *waiters) firstFor(w *worker.Worker, t time.Time) *waiter {
	if i := slices.IndexFunc(q.waiting, func(m *waiter) bool { return m.canUse(w, t) }); i >= 0 {
		return q.waiting[i]
	}
	return nil
}

// decide removes a waiter and sends its verdict. The caller holds the lock.
func (q *waiters) decide(m *waiter, v grant) {
	i, _ := slices.BinarySearchFunc(q.waiting, m, (*waiter).compare)
	q.waiting = slices.Delete(q.waiting, i, i+1)
	m.out = true
	q.length.Add(-1)
	m.verdict <- v
}

// waiter is one request in the queue.
type waiter struct {
	want   Wants
	offers Offers
	renew  func() (Offers, bool) // see Chooser; nil if the source does not follow its upstreams
	number uint64                // in the order of entering

	// as of the last review
	judge   judgment
	verdict chan grant // gets one grant when the waiter leaves the queue
	out     bool       // it has left the queue
}

// grant says how a wait ended. The zero grant says that there is no worker to wait for;
// the request then chooses again.
type grant struct {
	worker *worker.Worker // the queue has taken a slot of it for the request
	err    error          // too many requests wait, or this one waited too long
}

func (m *waiter) compare(o *waiter) int {
	a, b := &m.want, &o.want
	return cmp.Or(cmp.Compare(a.Tier, b.Tier), a.Arrival.Compare(b.Arrival), cmp.Compare(m.number, o.number))
}

// worker returns an offered worker.
func (m *waiter) worker(i int) *worker.Worker { return m.offers.Table.Rows[i].Worker }

// of returns the verdict on an offered worker.
func (m *waiter) of(i int, t time.Time) Verdict {
	m.judge.at = t
	return m.judge.of(m.offers.Ups[i], m.worker(i))
}

// best returns the best tier of the offered workers, full or not.
func (m *waiter) best(t time.Time) Verdict {
	best := NotNamed
	for i := range m.offers.Ups {
		if best = min(best, m.of(i, t).tier()); best == Fits {
			break
		}
	}
	return best
}

// leastBusy returns the least busy worker with room that mayUse accepts; nil if there is
// none.
func (m *waiter) leastBusy(t time.Time, mayUse func(*worker.Worker, Verdict) bool) (least *worker.Worker) {
	for i := range m.offers.Ups {
		if w := m.worker(i); mayUse(w, m.of(i, t)) && !w.IsFull() &&
			(least == nil || running(w) < running(least)) {
			least = w
		}
	}
	return least
}

// takeWorse takes a slot for a waiter that the queue would otherwise refuse. The worker may
// be marked down, but neither hung nor draining. If there is none, the grant has the error.
func (m *waiter) takeWorse(t time.Time, otherwise error) grant {
	w := m.leastBusy(t, func(w *worker.Worker, v Verdict) bool { return v <= MarkedDown && !w.IsHung() })
	if w == nil || !w.TakeSlot() {
		return grant{err: otherwise}
	}
	return grant{worker: w}
}

// canUse returns whether the waiter can use a slot of the worker.
func (m *waiter) canUse(w *worker.Worker, t time.Time) bool {
	v := NotNamed
	for i := range m.offers.Ups {
		if m.worker(i) == w {
			v = min(v, m.of(i, t).tier())
		}
	}
	return v == Fits || v.Possible() && v == m.best(t)
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
