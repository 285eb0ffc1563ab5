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
	length atomic.Int32 // those who come look at it before they take the lock

	mu      sync.Mutex
	classes map[classKey]*class
	key     []byte // of seat
	entered uint64
	looking bool // somebody looks after those who wait, every lookAfter
	rate    drainRate
}

// lookAfter is how often the waiters are looked at, whatever happens:
// workers recover, are drained no more, or learn models without a slot
// becoming free.
const lookAfter = 250 * time.Millisecond

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
	q.seat(m)
	if m.class.first == m { // else one before it, who could use the same, waits as well
		q.place(m, t)
	}
	if int(q.length.Load()) > most {
		last := q.lastOne()
		if w := last.takeWorse(); w != nil {
			q.decide(last, verdict{worker: w, worse: true}, t)
		} else {
			q.decide(last, verdict{full: true}, t)
		}
	}
	m.waits = m.class != nil
	if m.waits && !q.looking {
		q.looking = true
		go q.lookAfterThem()
	}
}

// atLast takes a waiter out whose time is up. It may still have room on a worker
// that is rated down.
func (q *queue) atLast(m *waiter) (v verdict, decided bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if m.class == nil {
		return <-m.verdict, true
	}
	t := now()
	q.remove(m)
	q.count(t, -1)
	if v.worker = m.takeWorse(); v.worker == nil {
		return v, false
	}
	q.rate.served++
	v.worse = true
	return v, true
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

// takeBeside takes a slot of a worker that nobody who waits wants.
func (q *queue) takeBeside(w *worker) bool {
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
		q.seat(m)
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

// seat puts a waiter into its class. The lock is held.
func (q *queue) seat(m *waiter) {
	m.seats = m.reseat(m.seats[:0])
	q.key = q.key[:0]
	for _, s := range m.seats {
		q.key = binary.LittleEndian.AppendUint64(q.key, s.worker.id)
	}
	c := q.classes[classKey{m.group, string(q.key)}]
	if c == nil {
		if q.classes == nil {
			q.classes = make(map[classKey]*class)
		}
		c = &class{key: classKey{m.group, string(q.key)}}
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

// outcome waits for what becomes of a waiter. It returns false if time was up or
// the context ended first.
func (q *queue) outcome(ctx context.Context, m *waiter, most time.Duration) (verdict, bool) {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case v := <-m.verdict:
		return v, true
	case <-timer.C:
		return q.atLast(m)
	case <-ctx.Done():
		if q.leave(m) {
			return verdict{}, false
		}
		return <-m.verdict, true
	}
}
