package pool

import (
	"fmt"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// needs says what the waiter needs of a worker: one that may serve it may serve all with the same needs. Of requests
// that are too long for some of the offered workers, it says for which.
func (m *waiter) needs() string {
	w, short := m.want, uint64(0)
	for i := range m.offers.Table.Rows {
		short *= 3 // a digit for each worker; of very many, it is a hash
		if w.Prompt > 0 && m.offers.Table.Rows[i].Worker.IsShort(w.Prompt, w.Answer) {
			short++
		}
	}
	return fmt.Sprintf("%q %s %q %p %d %d %v %v %v %v %v %v %v %v %d %p %v %v", w.Model, w.API, w.Taints, w.Only, w.Rank, w.Beyond,
		w.Workers, w.Workers == nil, w.Tried, w.Isolated, w.Session, w.Backups, w.Over, w.Part, short, m.offers.Table, m.renew != nil, w.isBackground())
}

// lane is the waiters with the same needs.
type lane struct {
	key        string // their needs
	want       Wants  // of one of them
	offers     Offers
	follows    bool // its source follows its upstreams
	background bool
	length     int

	judge judgment       // as of the last review
	free  *worker.Worker // see isReady
}

// refresh finds out again which models are served, and which workers are at the offered addresses. The
// caller holds the lock.
func (l *lane) refresh(r *registry) {
	l.offers = r.renewed(l.offers)
	l.judge = r.judgment(&l.want, l.offers, time.Time{})
}

// isReady returns whether the first waiter of a lane that needs some room can leave the queue. Then
// free is the least busy worker that it can use, not one of some, and nil if there is none to wait for. The caller
// holds the lock.
func (q *waiters) isReady(l *lane, room kvscore.Room, t time.Time, not []*worker.Worker) bool {
	if l.follows && len(l.offers.Ups) == 0 {
		return false // it waits for offers
	}
	best, spares := l.best(t), q.workers.spares(&l.want, l.offers, t)
	with := func(need kvscore.Room, not []*worker.Worker) *worker.Worker {
		return l.leastBusy(t, func(w *worker.Worker, v Verdict) bool {
			return spares && best.Possible() && v.tier() == best && !slices.Contains(not, w) && l.rankIn(q.roomsFor(l, w, t), need) >= 0
		})
	}
	free := with(room, not)
	if free == nil && best < Backup && (room == kvscore.SomeRoom || with(kvscore.SomeRoom, nil) == nil) {
		free = l.leastBusy(t, func(w *worker.Worker, v Verdict) bool { return v == Backup && !slices.Contains(not, w) })
	}
	if free != nil || room == kvscore.SomeRoom {
		l.free = free
	}
	return free != nil || !best.Possible()
}

// worker returns an offered worker.
func (l *lane) worker(i int) *worker.Worker { return l.offers.Table.Rows[i].Worker }

// of returns the verdict on an offered worker.
func (l *lane) of(i int, t time.Time) Verdict {
	l.judge.at = t
	return l.judge.of(l.offers.Ups[i], &l.offers.Table.Rows[i])
}

// verdict returns the best verdict on a worker, which may be offered several times.
func (l *lane) verdict(w *worker.Worker, t time.Time) Verdict {
	v := NotNamed
	for i := range l.offers.Ups {
		if l.worker(i) == w {
			v = min(v, l.of(i, t))
		}
	}
	return v
}

// best returns the best tier of the offered workers, full or not.
func (l *lane) best(t time.Time) Verdict {
	best := NotNamed
	for i := range l.offers.Ups {
		if best = min(best, l.of(i, t).tier()); best == Fits {
			break
		}
	}
	return best
}

// leastBusy returns the least busy worker with a free slot that mayUse accepts; nil if there is none.
func (l *lane) leastBusy(t time.Time, mayUse func(*worker.Worker, Verdict) bool) (least *worker.Worker) {
	for i := range l.offers.Ups {
		if w := l.worker(i); !w.IsFull() && (least == nil || running(w) < running(least)) && mayUse(w, l.of(i, t)) {
			least = w
		}
	}
	return least
}

// canUse returns whether the lane can use a slot of the worker.
func (l *lane) canUse(w *worker.Worker, t time.Time) bool {
	v := l.verdict(w, t).tier()
	return v == Fits || v == Backup || v.Possible() && v == l.best(t)
}

// isHeld returns whether the lane waits although a worker has a free slot.
func (l *lane) isHeld(t time.Time) bool {
	return l.leastBusy(t, func(_ *worker.Worker, v Verdict) bool { return v == Fits }) != nil
}
