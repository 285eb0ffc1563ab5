package pool

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Scratch holds the buffers of one choice. They grow with the pool, so they are
// reused; a request owns them only while it chooses.
type Scratch struct {
	Sel       kvscore.Selection
	Targets   []kvscore.TargetRef
	Upstreams []*reverseproxy.Upstream // of targets
	Workers   []*Worker                // of targets
	Full      []*Worker                // left out only because they are full
	Factors   []float64                // of targets: the client's preferences
	Scored    kvscore.Request          // the request with these
	Shadow    []kvscore.Candidate
}

// random is the process's source of randomness.
type random struct{}

// IntN implements kvscore.Rand.
func (random) IntN(n int) int { return rand.IntN(n) } //nolint:gosec // choices are no secrets

// Float64 implements kvscore.Rand.
func (random) Float64() float64 { return rand.Float64() } //nolint:gosec // choices are no secrets

func (p *Pool) TakeScratch() *Scratch {
	s, ok := p.scratches.Get().(*Scratch)
	if !ok {
		s = &Scratch{Sel: kvscore.Selection{Rand: random{}}}
	}
	return s
}

func (p *Pool) ReturnScratch(s *Scratch) {
	s.Sel.Blocks, s.Sel.Override = nil, nil
	s.Scored = kvscore.Request{}
	p.scratches.Put(s)
}

// Resort says which worse workers may be used.
type Resort struct{ Draining, Marked bool }

// resorts are in the order of preference. Marks are over soon, and drains are the
// operator's wish.
var resorts = [...]Resort{{}, {Marked: true}, {Draining: true}, {Draining: true, Marked: true}}

// allows returns whether a worker may be used at that resort.
func (r Resort) allows(w *Worker, t time.Time) bool {
	return (r.Draining || !w.Draining()) && (r.Marked || w.Health.Available(t))
}

// Available returns whether Caddy has an upstream available. One of a dynamic source
// that Caddy has not seen yet has no host, and counts as available.
func Available(up *reverseproxy.Upstream) bool {
	return up.Host == nil || up.Available()
}

// Gather fills in the targets to choose from, of workers that are available, not tried
// and not full, at the first resort that has any. It returns that resort. If the queue
// has granted a slot of a worker, the others count as full.
func (p *Pool) Gather(s *Scratch, want *Wants, model string, o Offers, granted *Worker, t time.Time) (used Resort, found bool) {
	for _, used = range resorts {
		p.gatherAt(s, want, model, o, granted, used, t)
		if len(s.Targets) > 0 {
			return used, true
		}
		if len(s.Full) > 0 {
			break // they are waited for: what is left is worse
		}
	}
	return Resort{}, false
}

// gatherAt is gather at one resort. Few requests are choosy: that is evaluated once.
func (p *Pool) gatherAt(s *Scratch, want *Wants, model string, o Offers, granted *Worker, used Resort, t time.Time) {
	targets, upstreams, workers := s.Targets[:0], s.Upstreams[:0], s.Workers[:0]
	s.Full = s.Full[:0]
	choosy := want.isChoosy()
	for i, up := range o.Ups {
		if !Available(up) {
			continue
		}
		row := &o.Table.Rows[i]
		w := row.Worker
		if row.Again && slices.Contains(workers, w) || slices.Contains(want.Tried, w) {
			continue
		}
		if choosy && !p.Fits(want, model, w) || !choosy && model != "" && !w.IsKnownToServe(model) {
			continue
		}
		if w != granted {
			if !used.allows(w, t) {
				continue
			}
			if granted != nil || w.Slots.full() && p.isFull(want, w) {
				s.Full = append(s.Full, w)
				continue
			}
		}
		for rank, target := range row.Targets {
			if want.Rank == AnyRank || want.Rank == int64(rank) {
				targets, upstreams, workers = append(targets, target), append(upstreams, up), append(workers, w)
			}
		}
	}
	s.Targets, s.Upstreams, s.Workers = targets, upstreams, workers
}

// isFull returns whether a worker has no room for the request. A speculative prefill
// makes room.
func (p *Pool) isFull(want *Wants, w *Worker) bool {
	return want.Slot && w.Slots.full() && (want.Dry || !p.Yield(w) || w.Slots.full())
}
