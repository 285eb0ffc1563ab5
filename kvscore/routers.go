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

	own    int       // own leases within unseenTime of each other
	at     time.Time // of the last of them
	met    int       // others' leases that these did not know
	unseen float64   // average of met for each own lease
	booked uint64    // own leases
	long   time.Time // when the last long one was booked
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
	near := now.Sub(r.at) <= unseenTime
	if remote {
		if near {
			r.met += r.own
		}
		return
	}
	r.booked++
	average(&r.unseen, r.booked, float64(r.met))
	if r.met = 0; !near {
		r.own = 0
	}
	r.own++
	if r.at = now; long {
		r.long = now
	}
}
