package handler

import (
	"context"
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// queue holds the requests that wait until a worker has room, in the order in
// which they arrived. A slot that becomes free goes to the first that can use
// it: it is taken in that request's name before anybody else sees it. One that
// cannot use it stops nobody behind it.
//
// Waiters that can use the same workers form a class, of which only the first
// needs to be looked at: so what a free slot costs depends on the number of
// classes, not of waiters.
type queue struct {
	pool   *pool
	length atomic.Int32 // those who come look at it before they take the lock

	mu      sync.Mutex
	classes map[classKey]*class
	key     []byte // of classify
	entered uint64
	looking bool // somebody looks after those who wait, every lookAfter
	rate    drainRate
}

// lookAfter is how often the waiters are looked at, whatever happens:
// workers recover, are drained no more, or learn models without a slot
// becoming free.
const lookAfter = 250 * time.Millisecond

// incidentFull is a condition that lasts, as the log and the admin API say it.
const incidentFull = "all workers are full, requests wait"

// enter takes in a request that needs a worker with room. If it need not wait,
// its verdict is there at once. If more than most wait then, the last of them
// is sent away, which may be another one: one that is tried again keeps its
// arrival.
func (q *queue) enter(m *waiter, most int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := now()
	q.entered++
	m.number = q.entered
	q.count(t, 1)
	q.classify(m)
	if m.class.first == m { // else one before it, who could use the same, waits as well
		q.place(m, t)
	}
	if int(q.length.Load()) > most {
		last := q.lastOne()
		w := last.takeWorse()
		q.decide(last, verdict{worker: w, full: w == nil}, t)
	}
	m.waits = m.class != nil
	if m.waits && !q.looking {
		q.looking = true
		go q.lookAfterThem()
	}
}

// atLast takes a waiter out whose time is up. It may still have room on a worker
// that is rated down.
func (q *queue) atLast(m *waiter) verdict {
	q.mu.Lock()
	defer q.mu.Unlock()
	if m.class != nil {
		w := m.takeWorse()
		q.decide(m, verdict{worker: w, late: w == nil}, now())
	}
	return <-m.verdict
}

// leave takes a waiter out. It returns false if its verdict is there.
func (q *queue) leave(m *waiter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if m.class == nil {
		return false
	}
	q.remove(m)
	q.count(now(), -1)
	return true
}

// freed takes in that a slot of a worker has become free. It takes no lock if
// nobody waits: whoever enters looks at the slots after it is seen to wait.
func (q *queue) freed(w *worker) {
	if q.length.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.give(w, now())
}

// takeUnclaimed takes a slot of a worker unless a queued request has first claim.
func (q *queue) takeUnclaimed(w *worker) bool {
	if q.length.Load() > 0 {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.firstFor(w, now()) != nil {
			return false
		}
	}
	return w.slots.take()
}

// look looks at the workers anew, after settings have changed.
func (q *queue) look() {
	if q.length.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.review(now())
}

// lookAfterThem looks after the waiters until there are none.
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
	if q.length.Load() == 0 {
		q.looking = false
		return false
	}
	q.review(now())
	return true
}

// review finds out anew which workers may serve those who wait, and gives each
// its room, in their order. The lock is held.
func (q *queue) review(t time.Time) {
	var all []*waiter
	for _, c := range q.classes {
		for m := c.first; m != nil; m = m.next {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, (*waiter).compare)
	clear(q.classes)
	for _, m := range all {
		q.classify(m)
	}
	for _, m := range all {
		if c := m.class; !c.stuck {
			w, hopeless := m.best(t)
			if c.stuck = w == nil && !hopeless || w != nil && !w.slots.take(); !c.stuck {
				q.decide(m, verdict{worker: w}, t)
			}
		}
	}
}

// classify puts a waiter into its class. The lock is held.
func (q *queue) classify(m *waiter) {
	m.eligible = q.pool.eligible(m.eligible[:0], &m.want, m.offers)
	q.key = q.key[:0]
	for _, s := range m.eligible {
		q.key = binary.LittleEndian.AppendUint64(q.key, s.worker.id)
	}
	c := q.classes[classKey{m.config, string(q.key)}]
	if c == nil {
		if q.classes == nil {
			q.classes = make(map[classKey]*class)
		}
		c = &class{key: classKey{m.config, string(q.key)}}
		q.classes[c.key] = c
	}
	c.insert(m)
}

// place gives a waiter room, if there is some that nobody before it wants. The
// lock is held.
func (q *queue) place(m *waiter, t time.Time) {
	for m.class != nil {
		w, hopeless := m.best(t)
		switch {
		case hopeless:
			q.decide(m, verdict{}, t)
		case w == nil:
			return
		default:
			q.give(w, t)
		}
	}
}

// give gives the room that a worker has to the first who want it. The lock is
// held.
func (q *queue) give(w *worker, t time.Time) {
	for !w.slots.full() {
		m := q.firstFor(w, t)
		if m == nil || !w.slots.take() {
			return
		}
		q.decide(m, verdict{worker: w}, t)
	}
}

// firstFor returns the first who wants room of a worker, nil if nobody does.
// The lock is held.
func (q *queue) firstFor(w *worker, t time.Time) *waiter {
	var first *waiter
	for _, c := range q.classes {
		if (first == nil || c.first.before(first)) && c.first.wants(w, t) {
			first = c.first
		}
	}
	return first
}

// decide takes a waiter out and tells it why. The lock is held.
func (q *queue) decide(m *waiter, v verdict, t time.Time) {
	q.remove(m)
	q.count(t, -1)
	if m.waits && v.worker != nil {
		q.rate.served++
	}
	m.verdict <- v
}

// remove takes a waiter out of its class. The lock is held.
func (q *queue) remove(m *waiter) {
	c := m.class
	if m.prev == nil {
		c.first = m.next
	} else {
		m.prev.next = m.next
	}
	if m.next == nil {
		c.last = m.prev
	} else {
		m.next.prev = m.prev
	}
	m.class, m.prev, m.next = nil, nil, nil
	if c.first == nil {
		delete(q.classes, c.key)
	}
}

// lastOne returns the last of all who wait. The lock is held.
func (q *queue) lastOne() *waiter {
	var last *waiter
	for _, c := range q.classes {
		if last == nil || last.before(c.last) {
			last = c.last
		}
	}
	return last
}

// count counts those who wait, and for how long there were some. The lock is
// held.
func (q *queue) count(t time.Time, more int32) {
	q.rate.pass(t, q.length.Load() > 0)
	q.length.Add(more)
}

// wait queues a request until it is granted a slot of a worker. It returns how long that
// took. config is the configuration that the offers are of.
func (p *pool) wait(ctx context.Context, want Wants, o offers, config any, most time.Duration) (v verdict, waited time.Duration) {
	m := &waiter{want: want, offers: o, config: config, verdict: make(chan verdict, 1)}
	p.queue.enter(m, p.settings.Load().maxWaiting)
	if !m.waits {
		return <-m.verdict, 0
	}
	began := now()
	p.incidents.met(began, incidentFull, p.logger)
	v = p.queue.outcome(ctx, m, most)
	return v, now().Sub(began)
}

// outcome waits for what becomes of a waiter.
func (q *queue) outcome(ctx context.Context, m *waiter, most time.Duration) verdict {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case v := <-m.verdict:
		return v
	case <-timer.C:
		return q.atLast(m)
	case <-ctx.Done():
		if q.leave(m) {
			return verdict{late: true}
		}
		return <-m.verdict
	}
}
