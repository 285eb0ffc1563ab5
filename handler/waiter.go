package handler

import (
	"cmp"
	"slices"
	"time"
)

// waiter is one request in the queue.
type waiter struct {
	want   Wants
	offers offers
	number uint64 // in the order of entering

	eligible []offer      // may serve the request now
	verdict  chan verdict // gets what becomes of the waiter, once it is out of the queue
	waits    bool         // it was not served at once
	out      bool         // of the queue
}

// verdict says what becomes of a waiter. Without a worker and without a reason, the
// request chooses again: there is no worker to wait for.
type verdict struct {
	worker *worker // a slot of it was taken for the request
	full   bool    // too many requests wait
	late   bool    // the time to wait is over, or the client left
}

func (m *waiter) compare(o *waiter) int {
	return cmp.Or(cmp.Compare(m.want.Tier, o.want.Tier), m.want.Arrival.Compare(o.want.Arrival), cmp.Compare(m.number, o.number))
}

// resort returns the waiter's resort, as gather does, false if there is no worker, full
// or not.
func (m *waiter) resort(t time.Time) (resort, bool) {
	for _, r := range resorts {
		for _, s := range m.eligible {
			if s.allowed(r, t) {
				return r, true
			}
		}
	}
	return resort{}, false
}

func (s offer) allowed(r resort, t time.Time) bool { return available(s.up) && r.allows(s.worker, t) }

// best returns the least busy worker with room, nil if there is none. hopeless says that
// there is no worker to wait for.
func (m *waiter) best(t time.Time) (best *worker, hopeless bool) {
	r, some := m.resort(t)
	for _, s := range m.eligible {
		if some && s.allowed(r, t) && !s.worker.slots.full() &&
			(best == nil || s.worker.slots.running.Load() < best.slots.running.Load()) {
			best = s.worker
		}
	}
	return best, !some
}

// takeWorse takes a slot of a worker that is marked down, but neither hung nor draining,
// for a waiter that would otherwise be refused. It returns nil if there is none.
func (m *waiter) takeWorse() (worse *worker) {
	for _, s := range m.eligible {
		if available(s.up) && !s.worker.draining() && !s.worker.flow.hangs() && !s.worker.slots.full() &&
			(worse == nil || s.worker.slots.running.Load() < worse.slots.running.Load()) {
			worse = s.worker
		}
	}
	if worse == nil || !worse.slots.take() {
		return nil
	}
	return worse
}

// wants returns whether the waiter would take a slot of the worker.
func (m *waiter) wants(w *worker, t time.Time) bool {
	i := slices.IndexFunc(m.eligible, func(s offer) bool { return s.worker == w })
	if i < 0 {
		return false
	}
	r, some := m.resort(t)
	return some && m.eligible[i].allowed(r, t)
}
