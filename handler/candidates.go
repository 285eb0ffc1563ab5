package handler

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Who drains a worker, as bits of worker.drain.
const (
	drainConfigured uint32 = 1 << iota
	drainAsked             // by the admin API
)

// draining tells whether the worker is to get no new requests.
func (w *worker) draining() bool { return w.drain.Load() != 0 }

// resort says which workers are made use of for want of better ones.
type resort struct{ draining, marked bool }

// resorts are in the order of preference. A mark is over soon, and a drain is
// the operator's wish: it goes before.
var resorts = [...]resort{{}, {marked: true}, {draining: true}, {draining: true, marked: true}}

// allows tells whether a worker may be used, at that resort.
func (r resort) allows(w *worker, t time.Time) bool {
	return (r.draining || !w.draining()) && (r.marked || !w.health.marked.Load() || w.health.available(t))
}

// room is what a choice is made in. It is as large as the pool, so that it is
// used again, and belongs to a request only while that chooses.
type room struct {
	sel       kvscore.Selection
	targets   []kvscore.TargetRef
	upstreams []*reverseproxy.Upstream // of targets
	workers   []*worker                // of targets
	full      []*worker                // left out only because they are full
	factors   []float64                // of targets, see score
	served    []bool                   // of table.models
	shadow    []kvscore.Candidate
}

// enterRoom gives the request a room.
func (rt *route) enterRoom() {
	r, ok := rt.pool.rooms.Get().(*room)
	if !ok {
		r = new(room)
	}
	r.sel.Rand = random{}
	rt.room = r
}

// leaveRoom takes it away.
func (rt *route) leaveRoom() {
	rt.sel.Blocks, rt.sel.Override = nil, nil
	rt.pool.rooms.Put(rt.room)
	rt.room = nil
}

// gather fills in the targets to choose from: workers that are available and
// were not tried; of these, those that are not draining and did well lately, if
// there are any; of these, those that are not full. It tells what it had to
// resort to.
func (rt *route) gather(pool reverseproxy.UpstreamPool, t time.Time) (used resort, found bool) {
	tab := rt.table(pool)
	for _, used = range resorts {
		rt.seat(pool, tab, used, t)
		if len(rt.targets) > 0 {
			return used, true
		}
		if len(rt.full) > 0 {
			break // they are waited for: what is left is worse
		}
	}
	return resort{}, false
}

// seat is gather with one resort. What most requests do not ask of a worker is
// found out once, not for each worker.
func (rt *route) seat(pool reverseproxy.UpstreamPool, tab *table, used resort, t time.Time) {
	targets, upstreams, workers := rt.targets[:0], rt.upstreams[:0], rt.workers[:0]
	rt.full = rt.full[:0]
	choosy, anyRank, second := rt.choosy(), rt.anyRank(), t.Unix()
	byModel, fresh := rt.model != "" && !rt.pinned(), true
	if byModel {
		rt.served = tab.serve(rt.model, rt.served[:0])
	}
	for i, up := range pool {
		if !available(up) {
			continue
		}
		row := &tab.rows[i]
		w := row.worker
		if !rt.dry {
			rt.meet(w, second)
		}
		if row.again && slices.Contains(workers, w) || slices.Contains(rt.tried, w) || choosy && !rt.fits(w) {
			continue
		}
		if byModel {
			yes, now := row.serves(rt.model, rt.served)
			if fresh = fresh && now; !yes {
				continue
			}
		}
		if !used.allows(w, t) && (w != rt.wait.reserved || !rt.wait.worse) {
			continue
		}
		if w.slots.full() && rt.isFull(w) {
			rt.full = append(rt.full, w)
			continue
		}
		for rank, target := range row.targets {
			if anyRank || rt.mayUse(rank) {
				targets, upstreams, workers = append(targets, target), append(upstreams, up), append(workers, w)
			}
		}
	}
	rt.targets, rt.upstreams, rt.workers = targets, upstreams, workers
	if !fresh {
		rt.h.table.CompareAndSwap(tab, nil) // the next request makes a new one
	}
}

// choosy tells whether there may be workers that do not fit the request for
// another reason than its model.
func (rt *route) choosy() bool {
	e := rt.plan.ext
	return rt.pinned() || rt.apart || rt.plan.pin.rank.Set ||
		e.AllowedWorkerIDs != nil || len(e.RoutingConstraints.RequiredTaints) > 0
}

// meet notes that a worker is an upstream of a request, in a second of Unix time.
func (rt *route) meet(w *worker, second int64) {
	if w.seen.Load() != second { // what is only read is shared by all processors
		w.seen.Store(second)
	}
	if rt.h.ReverseProxy.DynamicUpstreams != nil {
		rt.h.met(w)
	}
}

// available tells whether the proxy takes an upstream to be. Those of a dynamic
// source that the proxy has not seen yet have no host, and nothing against them.
func available(up *reverseproxy.Upstream) bool {
	return up.Host == nil || up.Available()
}
