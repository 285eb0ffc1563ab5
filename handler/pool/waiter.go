package pool

import (
	"cmp"
	"slices"
	"time"
)

// waiter is one request in the queue.
type waiter struct {
	want   Wants
	offers Offers
	number uint64 // in the order of entering

	eligible []offer    // may serve the request now
	verdict  chan Grant // gets what becomes of the waiter, once it is out of the queue
	waits    bool       // it was not served at once
	out      bool       // of the queue
}

// Grant says what becomes of a waiter. Without a worker and without a reason, the
// request chooses again: there is no worker to wait for.
type Grant struct {
	Worker *Worker // a slot of it was taken for the request
	Full   bool    // too many requests wait
	Late   bool    // the time to wait is over, or the client left
}

func (m *waiter) compare(o *waiter) int {
	return cmp.Or(cmp.Compare(m.want.Tier, o.want.Tier), m.want.Arrival.Compare(o.want.Arrival), cmp.Compare(m.number, o.number))
}

// resort returns the waiter's resort, as gather does, false if there is no worker, full
// or not.
func (m *waiter) resort(t time.Time) (Resort, bool) {
	for _, r := range resorts {
		for _, s := range m.eligible {
			if s.allowed(r, t) {
				return r, true
			}
		}
	}
	return Resort{}, false
}

func (s offer) allowed(r Resort, t time.Time) bool { return Available(s.up) && r.allows(s.worker, t) }

// best returns the least busy worker with room, nil if there is none. hopeless says that
// there is no worker to wait for.
func (m *waiter) best(t time.Time) (best *Worker, hopeless bool) {
	r, some := m.resort(t)
	for _, s := range m.eligible {
		if some && s.allowed(r, t) && !s.worker.Slots.full() &&
			(best == nil || s.worker.Slots.Running.Load() < best.Slots.Running.Load()) {
			best = s.worker
		}
	}
	return best, !some
}

// takeWorse takes a slot of a worker that is marked down, but neither hung nor draining,
// for a waiter that would otherwise be refused. It returns nil if there is none.
func (m *waiter) takeWorse() (worse *Worker) {
	for _, s := range m.eligible {
		if Available(s.up) && !s.worker.Draining() && !s.worker.Flow.Hangs() && !s.worker.Slots.full() &&
			(worse == nil || s.worker.Slots.Running.Load() < worse.Slots.Running.Load()) {
			worse = s.worker
		}
	}
	if worse == nil || !worse.Slots.Take() {
		return nil
	}
	return worse
}

// wants returns whether the waiter would take a slot of the worker.
func (m *waiter) wants(w *Worker, t time.Time) bool {
	i := slices.IndexFunc(m.eligible, func(s offer) bool { return s.worker == w })
	if i < 0 {
		return false
	}
	r, some := m.resort(t)
	return some && m.eligible[i].allowed(r, t)
}
