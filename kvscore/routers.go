package kvscore

import (
	"cmp"
	"slices"
	"time"
)

// routers are the routers that choose among the same targets, by the same rule. They learn of each
// other's leases a little later. Where requests come to several of them at one moment, all would take
// the same idle target: the parallel calls of an agent, for example. So each one prefers a share of
// the targets, by as much as that happens.
type routers struct {
	self, n int
	dirty   bool // the targets have changed since they were shared out

	burst       int       // own leases, each within unseenTime of the one before
	lastOwn     time.Time // own lease
	burstUnseen int       // others' leases that the burst's did not know
	meanUnseen  float64   // burstUnseen at each own lease, on average
	ownLeases   uint64
	lastLong    time.Time // own lease of a long prompt
}

const (
	// unseenTime is how long a booking may take to be known to other routers.
	unseenTime = 20 * time.Millisecond
	// sharePrice is the cost of another router's targets where each lease meets others', in prefills
	// of the request.
	sharePrice = 4
)

// SetRouters says that n routers book on the same targets, and that this one is number self of them,
// from 0. All routers must number themselves in one order.
func (s *Scheduler) SetRouters(self, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := &s.routers; r.self != self || r.n != n {
		r.self, r.n, r.dirty = self, n, true
	}
}

// divide shares the targets out evenly among the routers, in the targets' order. The lock is held.
func (s *Scheduler) divide() {
	if !s.routers.dirty {
		return
	}
	s.routers.dirty = false
	all := make([]*load, 0, len(s.targets))
	for _, ld := range s.targets {
		all = append(all, ld)
	}
	slices.SortFunc(all, func(a, b *load) int {
		return cmp.Or(cmp.Compare(a.target.Worker, b.target.Worker), cmp.Compare(a.target.Rank, b.target.Rank))
	})
	for i, ld := range all {
		ld.others = s.routers.n > 1 && i%s.routers.n != s.routers.self
	}
}

// count counts a new lease, of this router or of another one. A long one has a prompt of half a step at least.
func (r *routers) count(now time.Time, remote, long bool) {
	if r.n < 2 {
		return
	}
	near := now.Sub(r.lastOwn) <= unseenTime
	if remote {
		if near {
			r.burstUnseen += r.burst
		}
		return
	}
	r.ownLeases++
	average(&r.meanUnseen, r.ownLeases, float64(r.burstUnseen))
	if r.burstUnseen = 0; !near {
		r.burst = 0
	}
	r.burst++
	if r.lastOwn = now; long {
		r.lastLong = now
	}
}
