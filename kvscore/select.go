package kvscore

import (
	"cmp"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Request is what a scheduler must know of a request. It has many fields because it is all
// that a choice depends on.
type Request struct {
	// Prompt is the prompt. The zero value of its Weights stands for BlockTokens in each of
	// its Blocks.
	cache.Prompt
	// NominalBlockTokens is BlockTokens before the router has learned anything, for choices
	// that must not change by learning. 0 stands for BlockTokens.
	NominalBlockTokens float64
	// Streamed says that the router will see the end of the prefill. A stream shows it by its first
	// token; an answer without generated tokens, such as an embedding, by itself. The prefill of
	// other requests ends at its predicted time.
	Streamed bool
	// ExpectedTokens is the length of the answer that the client expects, in tokens. Near
	// to that length, its blocks weigh less. 0 is unknown.
	ExpectedTokens int64
	// Factors multiply the costs of the targets, by position. Nil and 0 stand for 1.
	Factors []float64
	// Override changes the options of the policy for this request. Nil changes nothing.
	Override *Override
	// BoundTarget is the target that the request's session is bound to, the zero Target if there
	// is none. A policy may prefer it.
	BoundTarget Target
	// Session is a hash of the client's session key, equal in all routers; 0 if the request
	// has none. Policies that break ties take the same target for a session each time: see
	// [Selection.Pick]. It needs no secret. A client that chooses its key by the hash can only choose
	// among targets that are equally good for its request.
	Session uint64
	// Priority is the client's hint: above 0, the request's own time weighs more; below 0,
	// less. Only [PredictedLatency] uses it.
	Priority int
	// Phase is the part of the request that the chosen target does.
	Phase Phase
	// Split says whether and how the request may be split. The zero value does not split it.
	Split Split
	// Ways say how the targets can serve the request, by position. Nil stands for EitherWay.
	Ways []Way
	// Remote says that another router has sent the request. The journal is not told of it again.
	Remote bool
}

// Select lets the policy choose among targets, and books the request on the chosen one. It
// returns the chosen position and the lease, or -1 and nil without targets. A bound of 0 or
// more is a position: Select takes that target without the policy. sel gets the terms of
// the choice in either case. It belongs to the caller, which may reuse it. The lease is nil if no
// target has room, with Selection.Needs, or if the request would be late, by Selection.Within.
//
// If the policy's choice is invalid, Select takes the least loaded target: see
// Selection.Fault. If the policy panics, nothing is booked.
//
// The policy runs under the lock, even one from another module. Without the lock,
// simultaneous requests would see the same loads and choose the same target. To detect
// this and choose again needs a second snapshot, which costs more than most policies.
func (s *Scheduler) Select(now time.Time, r *Request, among []TargetRef, bound int, p Policy, sel *Selection) (int, *Lease) {
	sel.Dry = false
	if len(among) == 0 {
		return -1, nil
	}
	s.lookUp(now, r, sel)
	bound, l := s.selectBooked(now, r, among, bound, p, sel)
	if l != nil && s.journal != nil && !r.Remote {
		phase := r.Phase
		if l.split {
			phase = PhaseDecode
		}
		l.journaled = s.journal.Booked(now, l.load.target, &sel.prompt, &sel.view, r.Streamed, r.ExpectedTokens, phase)
	}
	sel.view.Drop()
	sel.prompt = cache.Prompt{} // a Selection is used again
	return bound, l
}

func (s *Scheduler) selectBooked(now time.Time, r *Request, among []TargetRef, bound int, p Policy, sel *Selection) (int, *Lease) {
	s.mu.Lock()
	defer s.mu.Unlock() // also if the policy panics
	s.snapshot(now, r, among, sel)
	tokens := sel.Tokens // a policy may change sel
	late := sel.Within > 0 && sel.Soonest(bound) > sel.Within
	if bound < 0 || bound >= len(among) {
		if bound = s.choose(now, r, among, p, sel); sel.Fault {
			s.totals.PolicyFaults++
		}
	}
	if late {
		return bound, nil
	}
	chosen, needs := &sel.Candidates[bound], sel.Needs
	if needs == Clear {
		needs = RoomForSurplus(tokens - chosen.OverlapTokens)
	}
	if !chosen.Split && (needs > NoRoom && !s.anyRoom(now, among, needs) || sel.Quiet && !s.isQuiet(now, s.loadOf(among[bound]))) {
		return bound, nil
	}
	return bound, s.book(now, r, among[bound], tokens, chosen, sel)
}

// lookUp matches the request in the cache models, before the lock is taken.
func (s *Scheduler) lookUp(now time.Time, r *Request, sel *Selection) {
	sel.prompt = r.Prompt
	if w := &sel.prompt.Weights; w.Kinds == nil && w.All == 0 {
		*w = cache.Same(int64(r.BlockTokens * 1000))
	}
	s.caches.Look(now, &sel.prompt, &sel.view)
}

// choose returns the policy's choice, or the least loaded target if that is invalid. The
// lock is held.
func (s *Scheduler) choose(now time.Time, r *Request, among []TargetRef, p Policy, sel *Selection) int {
	if i := p.Choose(sel); i >= 0 && i < len(among) && sel.lists(among) {
		return i
	}
	s.snapshot(now, r, among, sel) // the policy may have changed it
	sel.Fault, sel.Drawn = true, sel.Drawn[:0]
	return new(LeastLoad).Choose(sel)
}

// lists reports whether the candidates are still these targets, in this order.
func (s *Selection) lists(among []TargetRef) bool {
	if len(s.Candidates) != len(among) {
		return false
	}
	for i := range among {
		if s.Candidates[i].Target != among[i].Target {
			return false
		}
	}
	return true
}

// snapshot sets the terms of a choice in sel. The lock is held.
func (s *Scheduler) snapshot(now time.Time, r *Request, among []TargetRef, sel *Selection) {
	sel.Findings = sel.view.Findings
	sel.BlockSize, sel.Override, sel.Priority, sel.Session = s.settings.BlockSize, r.Override, r.Priority, r.Session
	sel.Root, sel.Blocks, sel.NominalBlockTokens = r.Root, r.Blocks, cmp.Or(r.NominalBlockTokens, r.BlockTokens)
	sel.Fault, sel.Unknown, sel.BoundTarget = false, 0, -1
	s.divide()
	s.describe(now, r, sel)
	suspect := false
	sel.paces, sel.paced = mean{}, 0
	sel.Candidates = slices.Grow(sel.Candidates[:0], len(among))[:len(among)]
	for i := range among {
		c := &sel.Candidates[i]
		*c = Candidate{Target: among[i].Target, RequestBlocks: sel.RequestBlocks}
		if i < len(r.Factors) {
			c.Factor = r.Factors[i]
		}
		if ld := s.loadOf(among[i]); ld != nil {
			s.fill(now, ld, c, sel)
			suspect = suspect || ld.answers.anomalous.v > mostly
			if p := &ld.answers.pace; p.n > 0 {
				sel.paces.v, sel.paces.n, sel.paced = sel.paces.v+p.v, sel.paces.n+p.n, sel.paced+1
			}
		} else { // the target holds nothing; book declares it
			c.Unknown, c.Slowness = true, 1
			c.PrefillTime = s.latency.predict(featuresOf(1, workOf(sel.Tokens, 0), 0))
			sel.Unknown++
		}
		if r.BoundTarget != (Target{}) && c.Target == r.BoundTarget {
			sel.BoundTarget = i
		}
	}
	if found := suspect && s.findOutliers(now, among, sel); found || sel.Unknown > 0 {
		sel.assume()
	}
	for i := range sel.Candidates {
		c := &sel.Candidates[i]
		if c.assumed() {
			c.PrefillTime *= c.Slowness
		}
	}
	s.split(now, r, sel)
}

// fill sets the terms of a candidate from its target's load. The lock is held.
func (s *Scheduler) fill(now time.Time, ld *load, c *Candidate, sel *Selection) {
	ld.endDue(now)
	if sel.view.Any(ld.slot) {
		c.Overlap = sel.view.Of(ld.slot)
	}
	c.PrefillTokens = ld.prefill
	if ld.requests > 0 {
		c.PromptBlocks = ld.promptBlocks(s.settings.BlockSize)
	}
	c.UnsharedBlocks = ld.unshared
	c.OutputBlocks = max(0, float64(ld.output)-ld.faded)
	c.Requests, c.Remote, c.Others = ld.requests, ld.remote, ld.others
	s.predict(now, ld, c, sel)
	s.addExternal(now, ld, c)
}

// assume sets the terms of unknown candidates to the medians of the others: unknown is not
// idle. An outlier's terms become at least these medians. Its own terms become as many times more as
// it has had more answers than its peers, so that it gets its share.
func (s *Selection) assume() {
	assume(s, true, func(c *Candidate) *int64 { return &c.PrefillTokens })
	assume(s, true, func(c *Candidate) *float64 { return &c.PromptBlocks })
	assume(s, true, func(c *Candidate) *float64 { return &c.UnsharedBlocks })
	assume(s, true, func(c *Candidate) *float64 { return &c.OutputBlocks })
	assume(s, true, func(c *Candidate) *int { return &c.Requests })
	assume(s, true, func(c *Candidate) *float64 { return &c.WaitTime })
	assume(s, false, func(c *Candidate) *int { return &c.Awaiting })
	assume(s, false, func(c *Candidate) *float64 { return &c.MemoryUse })
	assume(s, false, func(c *Candidate) *float64 { return &c.memory })
	assume(s, false, func(c *Candidate) *float64 { return &c.RecentWork })
	assume(s, true, func(c *Candidate) *float64 { return &c.Slowness })
}

func assume[T int | int64 | float64](s *Selection, own bool, term func(*Candidate) *T) {
	known := make([]T, 0, len(s.Candidates))
	for i := range s.Candidates {
		if c := &s.Candidates[i]; !c.assumed() {
			known = append(known, *term(c))
		}
	}
	if len(known) == 0 {
		return
	}
	slices.Sort(known)
	median := (known[(len(known)-1)/2] + known[len(known)/2]) / 2
	for i := range s.Candidates {
		c := &s.Candidates[i]
		if !c.assumed() {
			continue
		}
		more := median
		if own && c.excess > 1 {
			more = T(c.excess * float64(median))
		}
		*term(c) = max(*term(c), more)
	}
}

// assumed returns whether terms of the candidate are assumed.
func (c *Candidate) assumed() bool { return c.Unknown || c.Outlier }

// book books the request on a target. The lock is held.
func (s *Scheduler) book(now time.Time, r *Request, t TargetRef, tokens int64, c *Candidate, sel *Selection) *Lease {
	ld := s.loadOf(t)
	if ld == nil {
		ld = s.declare(t.Target, 0)
		ld.retired = true
	}
	lacks := max(0, tokens-c.OverlapTokens)
	prefill, time := lacks, c.PrefillTime
	if c.Split {
		prefill, time = 0, 0 // another lease books them
	}
	l := &Lease{
		scheduler: s, load: ld, booked: now, estimate: r.Tokens - r.OtherTokens, tokens: tokens,
		blockSize: int64(s.settings.BlockSize), streamed: r.Streamed, remote: r.Remote, expected: r.ExpectedTokens,
		prefill: prefill, unshared: c.RequestBlocks,
		work: workOf(prefill, c.OverlapTokens), cached: c.OverlapTokens, knowledge: c.Knowledge,
		inFlight: c.SharedBlocks > 0, queued: len(ld.awaiting.leases) > 0, crowded: c.crowded, predicted: c.TTFT(), added: time,
		phase: r.Phase, split: c.Split, lacks: lacks, ahead: r.Split.Prefill,
	}
	if l.culprit = r.Session; l.culprit == 0 {
		l.culprit = uint64(now.UnixNano()) //nolint:gosec // only compared
		if n := len(r.Blocks); n > 0 {
			l.culprit = r.Root ^ r.Blocks[n-1]
		}
	}
	if prefill > 0 {
		l.usual = sel.usual(&ld.answers.pace, l.work)
	}
	l.total, l.others = blocksOf(l.tokens, l.blockSize), ld.requests
	if !c.Split {
		s.routers.count(now, r.Remote, 2*prefill >= ld.stepTokens())
		s.traffic.booked(now, prefill)
		ld.recent.add(now, time)
	}
	if ld.applied != s.learned {
		s.applyCapacity(ld)
	}
	s.caches.Book(now, &l.ticket, ld.slot, &sel.prompt, &sel.view)
	if share := l.ticket.Untracked(); share > 0 {
		l.untracked = l.unshared * share
		s.totals.Untracked++
	}
	s.addLoad(l, now)
	return l
}

// addLoad adds the lease to the load of its target. The lock is held.
func (s *Scheduler) addLoad(l *Lease, now time.Time) {
	ld := l.load
	ld.requests++
	ld.unshared += l.unshared
	ld.untracked += l.untracked
	ld.prefill += l.prefill
	if l.remote {
		ld.remote++
		ld.remotePrefill += l.prefill
	}
	if l.prefill > 0 {
		ld.awaiting.push(l, now)
		l.isAwaiting = true
	} else {
		l.decode()
	}
	if !l.streamed {
		l.due = now.Add(time.Duration(l.predicted * float64(time.Millisecond)))
		at, _ := slices.BinarySearchFunc(ld.due, l, func(a, b *Lease) int { return a.due.Compare(b.due) })
		ld.due = slices.Insert(ld.due, at, l)
	}
	s.leases[l] = struct{}{}
}
