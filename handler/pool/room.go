package pool

import (
	"cmp"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// place is what a request would add where it would go, as far as that is known.
type place struct {
	tokens int64   // to prefill
	time   float64 // predicted for that, in milliseconds
	work   float64 // of the whole request: see kvscore.Selection.Work
}

// holds is what the queue knows of rooms. A request is held while no target that may serve it has room:
// see [kvscore.Scheduler.Room]. What waits in the router can still be put in order. As soon as one has
// room, the first request in order chooses among all, also those without. To hold a request for its best
// target, or to leave out those without room, both cost more than they gain. The hold only delays. When
// the time of a held request is up, or the queue is too long, the first in order goes to an engine.
//
// While light tenants come, the surplus of others waits longer, for a target without prefill if its prompts are long.
// So a flood leaves no more work before their next requests than the prompts that have begun, and joins no step of theirs.
type holds struct {
	seen  map[*worker.Worker][]kvscore.Room // see rooms
	wakes map[*worker.Worker]bool           // see wake
}

// variedFor is how long requests are held after two tenants or classes were seen. With one of each, there is
// nobody to be fair to, and the engines' own queues do as well. They do not refuse late requests, though.
//
// sharedFor is how long background requests leave room for others.
const (
	variedFor = 5 * time.Minute
	sharedFor = 30 * time.Second
)

// who is a tenant in a class.
type who struct {
	class  string
	tenant uint64
}

// heed looks whether a request that comes, or leaves the queue, is of another tenant or class than the last one.
func (r *registry) heed(want *Wants, t time.Time) {
	if !want.isBackground() && t.UnixNano()-r.foreground.Load() >= int64(time.Second) {
		r.foreground.Store(t.UnixNano())
	}
	if t.UnixNano()-r.varied.Load() < int64(time.Second) {
		return
	}
	last, now := r.last.Load(), who{want.class(), want.Tenant}
	if last != nil && *last == now {
		return
	}
	r.last.Store(&now)
	if last != nil {
		r.varied.Store(t.UnixNano())
	}
}

// holds returns whether requests are held now.
func (r *registry) holds(t time.Time) bool {
	now, set := t.UnixNano(), r.Settings.Load()
	return (set.refuses || now-r.varied.Load() < int64(variedFor)) && set.Hold == HoldAuto && now >= r.loose.Load()
}

// isHeld returns whether a request waits in the router while no target has room. Three
// kinds do not: what needs no slot; prefill phases, because their decode phases are booked already; rests of streams.
func (r *registry) isHeld(want *Wants, t time.Time) bool {
	return want.Kind != worker.KindOther && want.Part != worker.Prefill && !want.Rest && r.holds(t)
}

// look begins a decision now: what was known of rooms is old. The caller holds the lock.
func (q *waiters) look() time.Time {
	clear(q.seen)
	return time.Now()
}

// rooms returns what room the ranks of a worker have; nil is any. Nothing is known of a backup's. The caller
// holds the lock.
func (q *waiters) rooms(w *worker.Worker, t time.Time) []kvscore.Room {
	if !q.workers.holds(t) || w.IsBackup() {
		return nil
	}
	rooms, known := q.seen[w]
	if known {
		return rooms
	}
	soonest := reviewEvery
	for rank := range w.Ranks() {
		room, in := q.workers.Scheduler.Room(t, w.Target(rank))
		if rooms = append(rooms, room); in > 0 {
			soonest = min(soonest, in)
		}
	}
	if q.seen == nil {
		q.seen = make(map[*worker.Worker][]kvscore.Room)
	}
	q.seen[w] = rooms
	if soonest < reviewEvery {
		q.wake(w, soonest)
	}
	return rooms
}

// roomsFor returns what room the ranks of a worker have for a lane; nil is any. The caller holds the lock.
func (q *waiters) roomsFor(l *lane, w *worker.Worker, t time.Time) []kvscore.Room {
	if !l.background {
		return q.rooms(w, t)
	}
	rooms := make([]kvscore.Room, w.Ranks())
	for rank := range rooms {
		if q.workers.isQuiet(w, w.Target(rank), t) {
			rooms[rank] = kvscore.Empty
		}
	}
	return rooms
}

// spares returns whether a background request may begin on a quiet target. While requests of other classes come, a
// quarter of the targets stays quiet. A background prefill that has begun cannot be stopped. If all targets compute
// one, any other request waits for half of it on average.
func (r *registry) spares(want *Wants, o Offers, t time.Time) bool {
	if !want.isBackground() || t.UnixNano()-r.foreground.Load() >= int64(sharedFor) {
		return true
	}
	quiet, all := 0, 0
	for i, v := range r.Judge(want, o, t) {
		if row := &o.Table.Rows[i]; !row.Repeated && v.tier() == Fits {
			for _, at := range row.Targets {
				if all++; r.isQuiet(row.Worker, at.Target, t) {
					quiet++
				}
			}
		}
	}
	return 4*quiet > all
}

// isQuiet returns whether a background request would delay no others on a rank of a worker. They find a quarter of
// its slots. See also [kvscore.Scheduler.IsQuiet].
func (r *registry) isQuiet(w *worker.Worker, at kvscore.Target, t time.Time) bool {
	return hasSpareSlots(w) && r.Scheduler.IsQuiet(t, at)
}

func hasSpareSlots(w *worker.Worker) bool {
	_, limit := w.Running()
	return limit == 0 || 4*w.FreeSlots() > limit
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

// rankIn returns the rank with the most room, of those that the lane allows and that have what is needed; -1
// if there is none. Nil rooms give 0.
func (l *lane) rankIn(rooms []kvscore.Room, need kvscore.Room) int {
	if rooms == nil {
		return 0
	}
	best := -1
	for rank, room := range rooms {
		if room >= need && (l.want.Rank == AnyRank || l.want.Rank == int64(rank)) {
			best, need = rank, room+1
		}
	}
	return best
}

// roomNeeded returns which room a request needs that has just come. Clear is that of a surplus.
func (p *Pool) roomNeeded(want *Wants, t time.Time) kvscore.Room {
	switch {
	case !p.isHeld(want, t):
		return kvscore.NoRoom
	case p.queue.length.Load() == 0:
		return kvscore.SomeRoom
	}
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	if p.queue.order.HasSurplus(want.Class, want.Tenant, t) {
		return kvscore.Clear
	}
	return kvscore.SomeRoom
}

// promise returns a grant of a worker's slot, and promises room there, which the waiter will probably
// take. The caller holds the lock.
func (q *waiters) promise(m *waiter, w *worker.Worker, rooms []kvscore.Room) grant {
	v := grant{worker: w, only: rooms == nil || m.lane.background}
	if rooms != nil {
		v.rank, v.tokens = m.lane.rankIn(rooms, kvscore.SomeRoom), m.tokens()
		q.workers.Scheduler.Promise(w.Target(v.rank), v.tokens)
		delete(q.seen, w)
	}
	return v
}

// tokens returns how many tokens of its prompt the waiter lacks, as far as that is known.
func (m *waiter) tokens() int64 { return cmp.Or(m.at.tokens, m.want.Prompt) }

// booked ends the promise of a grant.
func (q *waiters) booked(v *grant) {
	if v.tokens > 0 {
		q.workers.Scheduler.Promise(v.worker.Target(v.rank), -v.tokens)
		v.tokens = 0
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

// isBackground returns whether the request may only use what others leave. It gets a seat that no waiting
// request of another class can use, on a target where it delays none. What has begun goes on like any other.
func (w *Wants) isBackground() bool {
	return w.Class != nil && w.Class.Background && !w.Rest && w.Kind != worker.KindOther && w.Part != worker.Prefill
}
