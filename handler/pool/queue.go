package pool

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// queue holds the requests that wait until a worker has room, in their order. A slot
// that becomes free is taken for the first request that can use it.
type queue struct {
	pool   *Pool
	Length atomic.Int32 // requests read it before they take the lock

	mu      sync.Mutex
	waiting []*waiter // in order
	entered uint64
	looking bool // lookAfterThem runs
	rate    drainRate
}

// lookAfter is the time between two reviews of all waiters: workers recover, are
// undrained, or get other models without a slot becoming free.
const lookAfter = 250 * time.Millisecond

const incidentFull = "all workers are full, requests wait"

// Wait queues a request until it is granted a slot of a worker. It returns how long that
// took.
func (p *Pool) Wait(ctx context.Context, want Wants, o Offers, most time.Duration) (v Grant, waited time.Duration) {
	m := &waiter{want: want, offers: o, verdict: make(chan Grant, 1)}
	if !p.Queue.Enter(m, p.Settings.Load().MaxWaiting) {
		return <-m.verdict, 0
	}
	began := time.Now()
	p.Incidents.Raise(began, incidentFull, p.Logger)
	v = p.Queue.outcome(ctx, m, most)
	return v, time.Since(began)
}

// outcome waits for what becomes of a waiter.
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

// Enter queues a request and returns whether it has to wait. If more than most wait
// then, the last of them is refused. A request that is retried keeps its place.
func (q *queue) Enter(m *waiter, most int) (waits bool) {
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
	if m.waits && !q.looking {
		q.looking = true
		go q.lookAfterThem()
	}
	return m.waits
}

// atLast removes a waiter whose time is up. A worker that is marked down may have room.
func (q *queue) atLast(m *waiter) Grant {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !m.out {
		w := m.takeWorse()
		q.decide(m, Grant{Worker: w, Late: w == nil}, time.Now())
	}
	return <-m.verdict
}

// leave removes a waiter. It returns false if the waiter has its verdict.
func (q *queue) leave(m *waiter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if m.out {
		return false
	}
	q.remove(m, time.Now())
	return true
}

// freed hands on a slot of a worker that has become free. It takes no lock if the queue
// is empty: a request looks at the slots after it is counted in length.
func (q *queue) freed(w *Worker) {
	if q.Length.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for t := time.Now(); q.give(w, t); {
		continue // further slots may have become free
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

// look reviews all waiters, after settings have changed.
func (q *queue) look() {
	if q.Length.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.review(time.Now())
}

// lookAfterThem reviews all waiters every lookAfter until there are none.
func (q *queue) lookAfterThem() {
	ticker := time.NewTicker(lookAfter)
	defer ticker.Stop()
	for range ticker.C {
		if !q.lookAgain() {
			return
		}
	}
}

func (q *queue) lookAgain() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		q.looking = false
		return false
	}
	q.review(time.Now())
	return true
}

// review evaluates anew which workers may serve each waiter, and gives free slots to
// them in their order. The lock is held.
func (q *queue) review(t time.Time) {
	for _, m := range q.waiting {
		q.refresh(m)
	}
	for _, m := range slices.Clone(q.waiting) {
		q.place(m, t)
	}
}

// refresh evaluates which workers may serve a waiter. The lock is held.
func (q *queue) refresh(m *waiter) {
	m.eligible = q.pool.eligible(m.eligible[:0], &m.want, m.offers)
}

// place gives a waiter a free slot that no earlier waiter wants. The lock is held.
func (q *queue) place(m *waiter, t time.Time) {
	for !m.out {
		w, hopeless := m.best(t)
		if hopeless {
			q.decide(m, Grant{}, t)
		} else if w == nil || !q.give(w, t) {
			return
		}
	}
}

// give gives a free slot of a worker to the first waiter that wants it. It returns false
// if there is no slot, or none wants it. The lock is held.
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

// firstFor returns the first waiter that wants room of a worker, nil if none does.
// The lock is held.
func (q *queue) firstFor(w *Worker, t time.Time) *waiter {
	for _, m := range q.waiting {
		if m.wants(w, t) {
			return m
		}
	}
	return nil
}

// decide removes a waiter and sends its verdict. The lock is held.
func (q *queue) decide(m *waiter, v Grant, t time.Time) {
	q.remove(m, t)
	if m.waits && v.Worker != nil {
		q.rate.served++
	}
	m.verdict <- v
}

// remove removes a waiter. The lock is held.
func (q *queue) remove(m *waiter, t time.Time) {
	i, _ := slices.BinarySearchFunc(q.waiting, m, (*waiter).compare)
	q.waiting = slices.Delete(q.waiting, i, i+1)
	m.out = true
	q.count(t, -1)
}

// count counts the waiters, and for how long there were some. The lock is held.
func (q *queue) count(t time.Time, more int32) {
	q.rate.pass(t, q.Length.Load() > 0)
	q.Length.Add(more)
}
