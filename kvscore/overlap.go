package kvscore

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/index"
	"github.com/caddy-kvrouter/kvrouter/kvscore/index/exact"
)

// look is what the exact index and the prompts in flight say of one identity of a request.
type look struct {
	id     *Identity
	held   exact.Match
	flying index.Match
	flies  bool // flying is filled in
}

// lookUp matches the request in the cache models, before the scheduler's lock is taken.
func (s *Scheduler) lookUp(r *Request, sel *Selection) {
	chain := r.chain()
	s.index.Match(&chain, &sel.match)
	sel.looks = sel.looks[:0]
	for i := range r.Identities {
		id := &r.Identities[i]
		if len(id.Blocks) == 0 || len(sel.looks) == maxSizes {
			continue
		}
		if len(sel.looks) < cap(sel.looks) {
			sel.looks = sel.looks[:len(sel.looks)+1] // keeps the buffers
		} else {
			sel.looks = append(sel.looks, look{})
		}
		l := &sel.looks[len(sel.looks)-1]
		l.id, l.flies = id, false
		s.exact.Match(id.Root, id.Blocks, &l.held)
	}
}

// letGo keeps no reference to a request.
func letGo(looks []look) []look {
	for i := range looks {
		looks[i].id = nil
	}
	return looks[:0]
}

// lookAt returns what was looked up for a target's feed, nil if the feed says nothing of the
// request. The lock is held.
func (s *Scheduler) lookAt(sel *Selection, f *Feed) *look {
	if f == nil || f.info.Knowledge == Approximate {
		return nil
	}
	for i := range sel.looks {
		l := &sel.looks[i]
		if l.id.BlockTokens != f.info.BlockTokens {
			continue
		}
		if l.id.Adapter && !f.info.Adapters || l.id.Salted && !f.info.Salts {
			return nil
		}
		if !l.flies && s.flights.n > 0 {
			chain := l.id.chain()
			s.flights.index.Match(&chain, &l.flying)
			l.flies = true
		}
		return l
	}
	return nil
}

// knowledgeOf returns where the cache model for prompts of token ids comes from.
func (s *Scheduler) knowledgeOf(ld *load) Knowledge {
	if ld.feed == nil {
		return Approximate
	}
	return ld.feed.info.Knowledge
}

func (id *Identity) chain() index.Chain {
	return index.Chain{Root: id.Root, Blocks: id.Blocks, Weights: index.Same(int64(id.BlockTokens) * 1000)}
}

// depth returns how many leading blocks a target holds in a tier or in a faster one.
func (l *look) depth(f *Feed, t exact.Tier) int64 {
	if of := l.held.Depth[t]; f.number < len(of) {
		return int64(of[f.number])
	}
	return 0
}

// inFlight returns how many leading blocks requests in flight compute on a target.
func (l *look) inFlight(f *Feed) int64 {
	if l.flies && f.number < len(l.flying.Held) {
		return int64(l.flying.Held[f.number])
	}
	return 0
}

// overlapExact replaces the overlap of a target by what its engine's events say. The lock is
// held.
func (s *Scheduler) overlapExact(r *Request, ld *load, sel *Selection, c *Candidate) {
	l := s.lookAt(sel, ld.feed)
	if l == nil {
		return
	}
	f, size := ld.feed, int64(ld.feed.info.BlockTokens)
	most := max(0, sel.Tokens-1) / size // in blocks; engines compute the last token always
	device := min(most, max(l.depth(f, exact.Device), l.inFlight(f)))
	held := min(most, max(device, l.depth(f, exact.Shared)))
	if f.info.Knowledge == Partial && c.OverlapTokens >= held*size {
		return // the deeper of both counts
	}
	c.Knowledge = f.info.Knowledge
	if r.SkipsCache {
		return
	}
	c.OverlapTokens = held * size
	c.OverlapBlocks = min(float64(c.OverlapTokens)/float64(s.settings.BlockSize), c.RequestBlocks)
	if r.BlockTokens > 0 {
		c.HeldBlocks = int(float64(c.OverlapTokens) / r.BlockTokens)
	}
	if held > device {
		host := min(most, max(device, l.depth(f, exact.Host)))
		disk := min(most, max(host, l.depth(f, exact.Disk)))
		c.HostTokens, c.DiskTokens, c.ExternalTokens = (host-device)*size, (disk-host)*size, (held-disk)*size
	}
}

// The part of a computed token's time that a token saves if the engine loads it from a slower
// tier. They are Dynamo's defaults, host_cache_hit_weight and so on.
const (
	hostCredit, diskCredit, externalCredit = 0.75, 0.25, 0.5
)

// loading returns the time to load a candidate's tokens from slower tiers, as a number of
// tokens that take as long to compute.
func (c *Candidate) loading() float64 {
	return (1-hostCredit)*float64(c.HostTokens) + (1-diskCredit)*float64(c.DiskTokens) + (1-externalCredit)*float64(c.ExternalTokens)
}

// flightTime is how long after its first token, or its end, a prompt counts as held before an
// event has said so.
const flightTime = 5 * time.Second

// flights are the prompts that were sent lately to targets with feeds. They bridge the time
// until the engines' events arrive.
type flights struct {
	index       *index.Index // its slots are the feeds' numbers
	n           int          // prompts in the index
	first, last *Lease       // those with a first token, in the order of their ends
	now         time.Time    // the latest that was told
}

// at notes the time, and returns the latest.
func (q *flights) at(now time.Time) time.Time {
	if now.After(q.now) {
		q.now = now
	}
	return q.now
}

// flight is a lease's part in flights.
type flight struct {
	id    *Identity // until the first token, if the engine does not reuse a prefill under way
	feed  *Feed
	ref   index.Ref
	until time.Time // zero before the first token
	next  *Lease
}

// memory of the flights' index, in bytes.
const flightMemory = 64 << 20

// takeOff begins the flight of a lease that was booked. The lock is held.
func (s *Scheduler) takeOff(l *Lease, sel *Selection) {
	f := l.load.feed
	look := s.lookAt(sel, f)
	if look == nil || look.depth(f, exact.Device) == int64(len(look.id.Blocks)) {
		return // events tell all of it
	}
	l.flight.feed, l.flight.id = f, look.id
	if f.info.HitsInFlight {
		s.fly(l)
	}
}

// fly makes the lease's prompt count as held. The lock is held.
func (s *Scheduler) fly(l *Lease) {
	id, f := l.flight.id, l.flight.feed
	l.flight.id = nil
	if id == nil || f.closed {
		return
	}
	q := &s.flights
	q.index.SetCapacity(f.number, 0)
	chain := id.chain()
	l.flight.ref, _ = q.index.AcquireMatched(f.number, &chain, -1)
	if l.flight.ref == (index.Ref{}) {
		return
	}
	q.n++
}

// approach ends the flight of a lease in a while: its prompt is computed. The lock is held.
func (s *Scheduler) approach(now time.Time, l *Lease) {
	s.fly(l)
	q := &s.flights
	if l.flight.ref == (index.Ref{}) || !l.flight.until.IsZero() {
		return
	}
	l.flight.until = now.Add(flightTime)
	if q.last != nil {
		q.last.flight.next = l
	} else {
		q.first = l
	}
	q.last = l
}

// land ends a lease's flight. The lock is held.
func (s *Scheduler) land(l *Lease) {
	l.flight.id = nil
	if l.flight.ref != (index.Ref{}) {
		s.flights.index.Release(l.flight.ref, false)
		l.flight.ref = index.Ref{}
		s.flights.n--
	}
}

// landDue ends the flights whose time is over. The lock is held.
func (s *Scheduler) landDue(now time.Time) {
	now = s.flights.at(now)
	for q := &s.flights; q.first != nil && !q.first.flight.until.After(now); {
		l := q.first
		s.land(l)
		if q.first, l.flight.next = l.flight.next, nil; q.first == nil {
			q.last = nil
		}
	}
}

// landAll ends the flights to a target that has lost its cache. The lock is held.
func (s *Scheduler) landAll(f *Feed) {
	for l := s.leases.first; l != nil; l = l.next {
		if l.flight.feed == f && l.flight.ref != (index.Ref{}) {
			s.land(l)
		}
	}
	for l := s.flights.first; l != nil; l = l.flight.next {
		if l.flight.feed == f {
			s.land(l)
		}
	}
}
