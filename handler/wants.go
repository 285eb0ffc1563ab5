package handler

import (
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Wants is what a request needs of a worker, and its place in the queue. It does not
// change once it is made, so that the queue can evaluate it without the request.
type Wants struct {
	Model    string    // if any worker is known to serve it, the worker must be
	Only     *worker   // the one worker that may serve the request; nil = any
	Rank     int64     // the data-parallel rank; anyRank = any
	Workers  []uint64  // ids of the workers that the client allows; nil = all
	Taints   []string  // the worker must have all of these
	Isolated bool      // the engine must keep the caches of different salts apart
	API      string    // in this API
	Tried    []*worker // none of these
	Slot     bool      // the request takes one of the worker's slots
	Dry      bool      // the choice is only explained, and changes nothing
	Tier     int       // lower tiers leave the queue first
	Arrival  time.Time // within a tier, earlier requests do; includes the priority's head start
}

const anyRank = -1

// offers are the upstreams that the proxy offers for a request, with their workers.
type offers struct {
	ups   reverseproxy.UpstreamPool
	table *table
}

// offer is one worker that may serve a request, and its upstream.
type offer struct {
	up     *reverseproxy.Upstream
	worker *worker
}

// modelAmong returns the model that limits the workers to those that are known to
// serve it. It is empty if no worker is: engines often serve models by other names than
// they list. SGLang's names of adapters, base:adapter, stand for their base where no
// worker lists them.
func modelAmong(rows []tableRow, model string) string {
	if model == "" {
		return ""
	}
	isServed := func(model string) bool {
		return slices.ContainsFunc(rows, func(row tableRow) bool { return row.worker.isKnownToServe(model) })
	}
	if isServed(model) {
		return model
	}
	if base, _, ok := strings.Cut(model, ":"); ok && isServed(base) {
		return base
	}
	return ""
}

// isKnownToServe returns whether a worker is known to serve a model.
func (w *worker) isKnownToServe(model string) bool {
	yes, _ := w.serves(model)
	return yes
}

// fits returns whether a worker may serve the request, whose model is that of
// modelAmong. The worker that a request names serves whatever model is asked for.
func (p *pool) fits(want *Wants, model string, w *worker) bool {
	if want.Only != nil {
		return w == want.Only
	}
	return (model == "" || w.isKnownToServe(model)) && p.permits(want, w)
}

// permits returns whether the client's constraints allow a worker.
func (p *pool) permits(want *Wants, w *worker) bool {
	if want.Workers != nil && !slices.Contains(want.Workers, w.id) || want.Rank >= int64(w.ranks()) || !p.isolates(want, w) {
		return false
	}
	for _, taint := range want.Taints {
		if !slices.Contains(w.tainted(), taint) {
			return false
		}
	}
	return true
}

// isolates returns whether the worker's engine keeps caches apart, if that is needed.
func (p *pool) isolates(want *Wants, w *worker) bool {
	if !want.Isolated {
		return true
	}
	e := p.engineOf(w)
	return e.IsolatesCaches(want.API)
}

// isChoosy returns whether workers may be unfit for another reason than their models.
func (want *Wants) isChoosy() bool {
	return want.Only != nil || want.Isolated || want.Rank != anyRank || want.Workers != nil || len(want.Taints) > 0
}

// eligible appends the offered workers that may serve the request and were not tried.
// Workers that the pool has forgotten since the offer are left out.
func (p *pool) eligible(list []offer, want *Wants, o offers) []offer {
	model, stale := modelAmong(o.table.rows, want.Model), o.table.layout != p.layout.Load()
	for i, row := range o.table.rows {
		w := row.worker
		if stale && w != p.unnamed {
			w = p.known(w.dial)
		}
		if w != nil && !row.again && !slices.Contains(want.Tried, w) && p.fits(want, model, w) {
			list = append(list, offer{o.ups[i], w})
		}
	}
	return list
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

// Reasons why a worker drains, as bits of worker.drain.
const (
	drainConfigured uint32 = 1 << iota
	drainAsked             // by the admin API
)

// draining returns whether the worker gets no new requests.
func (w *worker) draining() bool { return w.drain.Load() != 0 }

// resort says which workers are used if there are no better ones.
type resort struct{ draining, marked bool }

// resorts are in the order of preference. A mark is over soon, and a drain is
// the operator's wish: it goes before.
var resorts = [...]resort{{}, {marked: true}, {draining: true}, {draining: true, marked: true}}

// allows returns whether a worker may be used at that resort.
func (r resort) allows(w *worker, t time.Time) bool {
	return (r.draining || !w.draining()) && (r.marked || w.health.available(t))
}

// available returns whether Caddy has an upstream available. One of a dynamic source
// that Caddy has not seen yet has no host, and counts as available.
func available(up *reverseproxy.Upstream) bool {
	return up.Host == nil || up.Available()
}
