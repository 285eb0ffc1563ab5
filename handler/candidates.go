package handler

import (
	"context"
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
	return (r.draining || !w.draining()) && (r.marked || w.health.available(t))
}

// scratch holds the buffers of one choice. They grow with the pool, so they are
// reused; a request owns them only inside choose.
type scratch struct {
	sel       kvscore.Selection
	targets   []kvscore.TargetRef
	upstreams []*reverseproxy.Upstream // of targets
	workers   []*worker                // of targets
	full      []*worker                // left out only because they are full
	factors   []float64                // of targets, see score
	scored    kvscore.Request          // see score
	shadow    []kvscore.Candidate
}

func (rt *route) takeScratch() {
	s, ok := rt.pool.scratches.Get().(*scratch)
	if !ok {
		s = new(scratch)
	}
	s.sel.Rand = random{}
	rt.scratch = s
}

func (rt *route) returnScratch() {
	rt.scratch.sel.Blocks, rt.scratch.sel.Override = nil, nil
	rt.scratch.scored = kvscore.Request{}
	rt.pool.scratches.Put(rt.scratch)
	rt.scratch = nil
}

// withoutScratch calls a function that waits. The request returns its scratch
// meanwhile: thousands may wait at a time. The candidates are gone afterwards.
func (rt *route) withoutScratch(ctx context.Context, wait func(context.Context) bool) bool {
	rt.returnScratch()
	defer rt.takeScratch()
	return wait(ctx)
}

// gather fills in the targets that the request's next attempt can be made on.
func (rt *route) gather(pool reverseproxy.UpstreamPool, t time.Time) (used resort, found bool) {
	tab, second := rt.table(pool), t.Unix()
	if tab.meets(rt, second) {
		for i := range tab.rows {
			rt.meet(tab.rows[i].worker, second)
		}
	}
	want := rt.wants()
	rt.model = modelAmong(tab.rows, want.Model)
	return rt.pool.gather(rt.scratch, &want, rt.model, offers{pool, tab}, rt.wait.granted, t)
}

// gather fills in the targets to choose from: workers that are available and
// were not tried; of these, those that are not draining and did well lately, if
// there are any; of these, those that are not full. It returns what it had to
// resort to. If the queue has granted a slot of a worker, the others count as full.
func (p *pool) gather(s *scratch, want *Wants, model string, o offers, granted *worker, t time.Time) (used resort, found bool) {
	for _, used = range resorts {
		p.gatherAt(s, want, model, o, granted, used, t)
		if len(s.targets) > 0 {
			return used, true
		}
		if len(s.full) > 0 {
			break // they are waited for: what is left is worse
		}
	}
	return resort{}, false
}

// gatherAt is gather with one resort. It evaluates once, not per worker, whether the
// request has wishes that few requests have.
func (p *pool) gatherAt(s *scratch, want *Wants, model string, o offers, granted *worker, used resort, t time.Time) {
	targets, upstreams, workers := s.targets[:0], s.upstreams[:0], s.workers[:0]
	s.full = s.full[:0]
	choosy := want.isChoosy()
	for i, up := range o.ups {
		if !available(up) {
			continue
		}
		row := &o.table.rows[i]
		w := row.worker
		if row.again && slices.Contains(workers, w) || slices.Contains(want.Tried, w) {
			continue
		}
		if choosy && !p.fits(want, model, w) || !choosy && model != "" && !w.isKnownToServe(model) {
			continue
		}
		if w != granted {
			if !used.allows(w, t) {
				continue
			}
			if granted != nil || w.slots.full() && p.isFull(want, w) {
				s.full = append(s.full, w)
				continue
			}
		}
		for rank, target := range row.targets {
			if want.Rank == anyRank || want.Rank == int64(rank) {
				targets, upstreams, workers = append(targets, target), append(upstreams, up), append(workers, w)
			}
		}
	}
	s.targets, s.upstreams, s.workers = targets, upstreams, workers
}

// isFull returns whether a worker has no room for the request. A speculative prefill
// makes room.
func (p *pool) isFull(want *Wants, w *worker) bool {
	return want.Slot && w.slots.full() && (want.Dry || !p.yield(w) || w.slots.full())
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
