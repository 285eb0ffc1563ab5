package pool

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// spot is the target where a request waits for room. Without a worker, it waits for any.
type spot struct {
	worker *worker.Worker
	rank   int64 // AnyRank if it waits for any
}

// place is a spot, and what the request would add there.
type place struct {
	spot
	tokens   int64          // to prefill
	time     float64        // predicted for that, in milliseconds
	work     float64        // of the whole request: see kvscore.Selection.Work
	declined *worker.Worker // the request waits although this worker had room
}

// holds is what the queue knows of requests that wait for room. A request is held while its best
// target has no room, even if another one has: see [kvscore.Scheduler.HasRoom]. What waits in the router can
// still be put in order. The hold only delays: a request whose time is up, or for which the queue is
// too long, goes to the engine.
type holds struct {
	// held is the predicted prefill time of those that wait for a target, by who they are, in milliseconds.
	held  map[holder]float64
	seen  map[*worker.Worker][]bool // see rooms
	wakes map[*worker.Worker]bool   // see wake
}

// holder is a tenant's requests of a class that wait for a target.
type holder struct {
	class  string
	tenant uint64
	target kvscore.Target
}

// holds returns whether requests are held now.
func (r *registry) holds(t time.Time) bool {
	return r.Settings.Load().Hold == HoldAuto && t.UnixNano() >= r.loose.Load()
}

// isHeld returns whether a request waits in the router while its target has no room. Three
// kinds do not: what needs no slot; prefill phases, because their decode phases are booked already; rests of streams.
func (r *registry) isHeld(want *Wants, t time.Time) bool {
	return want.Kind != worker.KindOther && want.Part != worker.Prefill && !want.Rest && r.holds(t)
}

// look begins a decision at a time: what was known of rooms is old. The caller holds the lock.
func (q *waiters) look(time.Time) { clear(q.seen) }

// rooms returns which ranks of a worker have room; nil stands for all. The caller holds the lock.
func (q *waiters) rooms(w *worker.Worker, t time.Time) []bool {
	if !q.workers.holds(t) {
		return nil
	}
	rooms, known := q.seen[w]
	if known {
		return rooms
	}
	soonest := reviewEvery
	for rank := range w.Ranks() {
		ok, in := q.workers.Scheduler.HasRoom(t, w.Target(rank))
		if rooms = append(rooms, ok); !ok && in > 0 {
			soonest = min(soonest, in)
		}
	}
	if q.seen == nil {
		q.seen = make(map[*worker.Worker][]bool)
	}
	q.seen[w] = rooms
	if soonest < reviewEvery {
		q.wake(w, soonest)
	}
	return rooms
}

// roomsFor returns which ranks of a worker have room for a lane; nil stands for all. The caller holds the
// lock.
func (q *waiters) roomsFor(l *lane, w *worker.Worker, t time.Time) []bool {
	if !l.background {
		return q.rooms(w, t)
	}
	rooms := make([]bool, w.Ranks())
	_, limit := w.Running()
	for rank := range rooms { // others find a quarter of the slots
		rooms[rank] = q.others.Load() == 0 && (limit == 0 || 4*w.FreeSlots() > limit) && q.workers.Scheduler.IsQuiet(t, w.Target(rank))
	}
	return rooms
}

// wake looks at a worker again in a while, because it will have room then as predicted. The caller holds
// the lock.
func (q *waiters) wake(w *worker.Worker, in time.Duration) {
	if q.wakes[w] {
		return
	}
	if q.wakes == nil {
		q.wakes = make(map[*worker.Worker]bool)
	}
	q.wakes[w] = true
	time.AfterFunc(max(in, time.Millisecond), func() {
		q.mu.Lock()
		delete(q.wakes, w)
		q.mu.Unlock()
		q.freed(w)
	})
}

// waitsFor returns whether the lane waits for a worker with some room.
func (l *lane) waitsFor(w *worker.Worker, rooms []bool) bool {
	if l.at.worker != nil && l.at.worker != w {
		return false
	}
	return rooms == nil || l.rankFor(rooms) >= 0
}

// rankFor returns the first rank with room that the lane can use; -1 if there is none.
func (l *lane) rankFor(rooms []bool) int64 {
	only := l.want.Rank
	if l.at.worker != nil {
		only = l.at.rank
	}
	for rank, ok := range rooms {
		if ok && (only == AnyRank || only == int64(rank)) {
			return int64(rank)
		}
	}
	return -1
}

// promise returns a grant of a worker's slot, and promises the room that the waiter will take. The caller
// holds the lock.
func (q *waiters) promise(m *waiter, w *worker.Worker, rooms []bool) grant {
	v := grant{worker: w, rank: m.at.rank}
	if m.at.worker == nil {
		v.rank = AnyRank
	}
	if rooms != nil {
		v.rank, v.tokens = m.lane.rankFor(rooms), m.at.tokens
		if m.at.worker == nil {
			v.tokens = m.want.Prompt
		}
		q.workers.Scheduler.Promise(w.Target(int(v.rank)), v.tokens)
		delete(q.seen, w)
	}
	return v
}

// booked ends the promise of a grant.
func (q *waiters) booked(v *grant) {
	if v.tokens > 0 {
		q.workers.Scheduler.Promise(v.worker.Target(int(v.rank)), -v.tokens)
		v.tokens = 0
	}
}

// hold adds what a waiter would add to its target to what is held, or takes it away with a sign of -1. The
// caller holds the lock.
func (q *waiters) hold(m *waiter, sign float64) {
	if m.at.worker == nil {
		return
	}
	if q.held == nil {
		q.held = make(map[holder]float64)
	}
	of := m.holder(m.at.worker.Target(int(m.at.rank)))
	if q.held[of] += sign * m.at.time; q.held[of] < 1e-6 {
		delete(q.held, of)
	}
}

func (m *waiter) holder(t kvscore.Target) holder {
	return holder{m.want.class(), m.want.Tenant, t}
}

// heldAt returns what is held of the request's tenant and class, for each target. Those of others do not
// count, because they do not all go first. It is nil if nothing is.
func (q *waiters) heldAt(want *Wants, targets []kvscore.TargetRef, to []float64) []float64 {
	if q.length.Load() == 0 {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.held) == 0 {
		return nil
	}
	to = to[:0]
	for i := range targets {
		to = append(to, q.held[holder{want.class(), want.Tenant, targets[i].Target}])
	}
	return to
}

// temptAgain is how long after a request has not taken a worker's room another one is asked.
const temptAgain = 10 * time.Millisecond

// tempt has a waiter choose again, if a worker has room and none waits for it: what is computed in idle
// time delays nobody. It is the first waiter that can use the worker. The caller holds the lock.
func (q *waiters) tempt(w *worker.Worker, t time.Time) {
	if len(q.held) == 0 || w.IsFull() {
		return
	}
	rooms := q.rooms(w, t)
	if rooms == nil {
		return
	}
	m := q.first(func(l *lane) bool {
		return l.at.worker != nil && !l.background && l.at.worker != w && l.declined != w && l.hasRoom(rooms) && l.canUse(w, t)
	}, t)
	if m != nil {
		q.decide(m, grant{tempts: w})
		q.wake(w, temptAgain)
	}
}

// hasRoom returns whether a worker with some room has it at a rank that the request allows.
func (l *lane) hasRoom(rooms []bool) bool {
	for rank, ok := range rooms {
		if ok && (l.want.Rank == AnyRank || l.want.Rank == int64(rank)) {
			return true
		}
	}
	return false
}

// temptAll tempts requests with all workers that they can use. The caller holds the lock.
func (q *waiters) temptAll(t time.Time) {
	if len(q.held) == 0 {
		return
	}
	asked := make(map[*worker.Worker]bool)
	for _, l := range q.lanes {
		if l.at.worker == nil {
			continue
		}
		for i := range l.offers.Ups {
			if w := l.worker(i); !asked[w] {
				asked[w] = true
				q.tempt(w, t)
			}
		}
	}
}

// class returns the name of the request's class.
func (w *Wants) class() string {
	if w.Class == nil {
		return ""
	}
	return w.Class.Name
}

// roomier gives the room of a target to waiters: a prefill there is over, of this router or another.
func (p *Pool) roomier(t kvscore.Target) {
	n := p.queue.length.Load()
	if n == 0 || n == p.queue.others.Load() && !p.holds(time.Now()) {
		return
	}
	if w := p.ByID(t.Worker); w != nil {
		p.queue.freed(w)
	}
}

// isBackground returns whether the request may only use what others leave: it gets a seat while none of
// another class waits, on a target where it delays none. What has begun goes on like any other.
func (w *Wants) isBackground() bool {
	return w.Class != nil && w.Class.Background && !w.Rest && w.Kind != worker.KindOther && w.Part != worker.Prefill
}
