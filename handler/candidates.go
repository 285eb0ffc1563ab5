package handler

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// scratch holds the buffers of one choice. They grow with the pool, so they are
// reused; a request owns them only while it chooses.
type scratch struct {
	sel       kvscore.Selection
	targets   []kvscore.TargetRef
	upstreams []*reverseproxy.Upstream // of targets
	workers   []*worker                // of targets
	full      []*worker                // left out only because they are full
	factors   []float64                // of targets: the client's preferences
	scored    kvscore.Request          // the request with these
	shadow    []kvscore.Candidate
}

// random is the process's source of randomness.
type random struct{}

// IntN implements kvscore.Rand.
func (random) IntN(n int) int { return rand.IntN(n) } //nolint:gosec // choices are no secrets

// Float64 implements kvscore.Rand.
func (random) Float64() float64 { return rand.Float64() } //nolint:gosec // choices are no secrets

func (p *pool) takeScratch() *scratch {
	s, ok := p.scratches.Get().(*scratch)
	if !ok {
		s = &scratch{sel: kvscore.Selection{Rand: random{}}}
	}
	return s
}

func (p *pool) returnScratch(s *scratch) {
	s.sel.Blocks, s.sel.Override = nil, nil
	s.scored = kvscore.Request{}
	p.scratches.Put(s)
}

// resort says which worse workers may be used.
type resort struct{ draining, marked bool }

// resorts are in the order of preference. Marks are over soon, and drains are the
// operator's wish.
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

// gather fills in the targets to choose from, of workers that are available, not tried
// and not full, at the first resort that has any. It returns that resort. If the queue
// has granted a slot of a worker, the others count as full.
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

// gatherAt is gather at one resort. Few requests are choosy: that is evaluated once.
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
