package kvscore

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/index"
)

// Request is what a scheduler must know of a request.
type Request struct {
	// Root identifies what prompts must have in common to share blocks at all:
	// model, LoRA, salt, kind of content.
	Root uint64
	// Blocks are the content hashes of the prompt's full blocks in order.
	Blocks []uint64
	// BlockTokens is the number of tokens in one of Blocks, estimated where
	// they are blocks of text.
	BlockTokens float64
	// Weights are the tokens in each of Blocks by its kind, in milli-tokens, where
	// they are blocks of text. The zero value stands for BlockTokens in each.
	Weights index.Weights
	// Past is how far the prompt goes on behind its last full block, in blocks.
	Past float32
	// MediaTokens and OtherTokens are what of Tokens is not in Blocks and Past:
	// images and the like, and the other prompts of a batch.
	MediaTokens, OtherTokens int64
	// MediaEnd is how many of Blocks, and perhaps one more, it takes to have all
	// images of the prompt; 0 if there are none.
	MediaEnd int
	// SkipsCache says that the engine computes the whole prompt, whatever its
	// cache holds, as vLLM does for prompt_logprobs. What it computes is held
	// afterwards as usual.
	SkipsCache bool
	// NominalBlockTokens is the same as BlockTokens before anything was learned, for choices
	// that must not change with what is learned. 0 stands for BlockTokens.
	NominalBlockTokens float64
	// Tokens is the length of the prompt, known or estimated.
	Tokens int64
	// Streamed says that the first token will be seen when it comes. The
	// prefill of other requests is taken to be over when it should be.
	Streamed bool
	// ExpectedTokens is how long the client expects the answer to be: the nearer
	// it comes to that, the less its blocks weigh. 0 is not known.
	ExpectedTokens int64
	// Factors are what the costs of the targets are multiplied with, by their
	// position. Nil, and 0, stand for 1.
	Factors []float64
	// Override changes the policy for this request; nil changes nothing.
	Override *Override
	// Home is the target that the request's session is bound to, the zero Target if
	// there is none. A policy may count it as a reason to stay there.
	Home Target
	// Priority is what the client asks for: above 0, the request's own time weighs
	// more; below 0, less.
	Priority int
}

// Select lets the policy choose among targets and books the request on the
// chosen one. It returns the chosen position, and the lease; -1 and nil if
// there are no targets. bound is the position of the target that the choice is
// already made for, negative if it is not; the candidates' terms are filled in
// all the same. sel keeps the terms of the choice; it is the caller's, to be
// used again.
//
// If the policy makes no choice, the target with the least load is taken: see
// Selection.Fault. If it panics, nothing is booked.
func (s *Scheduler) Select(now time.Time, r *Request, targets []Target, bound int, p Policy, sel *Selection) (int, *Lease) {
	return s.SelectAmong(now, r, sel.among(targets), bound, p, sel)
}

// among returns references without short cuts. They are the Selection's.
func (s *Selection) among(targets []Target) []TargetRef {
	s.refs = s.refs[:0]
	for _, t := range targets {
		s.refs = append(s.refs, TargetRef{Target: t})
	}
	return s.refs
}

// SelectAmong is Select for long lists of targets: see [Scheduler.Refs].
//
// The policy, which may be anybody's, runs under the lock. Without the lock,
// simultaneous requests would see the same loads and choose the same target.
// Detecting this and choosing again needs a second snapshot, which costs more than
// most policies.
func (s *Scheduler) SelectAmong(now time.Time, r *Request, among []TargetRef, bound int, p Policy, sel *Selection) (int, *Lease) {
	sel.Dry = false
	if len(among) == 0 {
		return -1, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock() // also if the policy panics
	s.snapshot(now, r, among, sel)
	tokens := sel.Tokens // a policy may change sel
	if bound < 0 || bound >= len(among) {
		if bound = s.choose(now, r, among, p, sel); sel.Fault {
			s.policyFaults++
		}
	}
	return bound, s.book(now, r, among[bound], tokens, &sel.Candidates[bound], sel)
}

// choose returns the position that the policy chooses, or in its place that of
// the target with the least load. The lock is held.
func (s *Scheduler) choose(now time.Time, r *Request, among []TargetRef, p Policy, sel *Selection) int {
	if i := p.Choose(sel); i >= 0 && i < len(among) && sel.lists(among) {
		return i
	}
	s.snapshot(now, r, among, sel) // the policy may have spoilt it
	sel.Fault, sel.Drawn = true, sel.Drawn[:0]
	return s.fallback.Choose(sel)
}

// lists tells whether the candidates are still these targets, in this order.
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

// snapshot fills in sel for the request. The lock is held.
func (s *Scheduler) snapshot(now time.Time, r *Request, among []TargetRef, sel *Selection) {
	chain := r.chain()
	s.index.Match(&chain, &s.match)
	sel.Tokens, sel.RequestBlocks = s.measure(r, &chain)
	sel.Known = Known{s.match.Blocks, s.match.Known - float64(s.match.Blocks), float64(s.match.KnownTokens) / 1000, s.match.Counted}
	sel.BlockSize, sel.Override, sel.Priority = s.settings.BlockSize, r.Override, r.Priority
	sel.Root, sel.Blocks, sel.NominalBlockTokens = r.Root, r.Blocks, r.NominalBlockTokens
	if sel.NominalBlockTokens == 0 {
		sel.NominalBlockTokens = r.BlockTokens
	}
	sel.Fault, sel.Unknown, sel.Home, sel.Awaiting = false, 0, -1, 0
	s.describe(r, sel)
	sel.Candidates = slices.Grow(sel.Candidates[:0], len(among))[:len(among)]
	for i := range among {
		c := &sel.Candidates[i]
		*c = Candidate{Target: among[i].Target, RequestBlocks: sel.RequestBlocks}
		if i < len(r.Factors) {
			c.Factor = r.Factors[i]
		}
		if ld := s.loadOf(among[i]); ld != nil {
			s.fill(now, r, ld, c, sel)
		} else { // the target holds nothing; book declares it
			c.Unknown = true
			sel.Unknown++
			s.predictUnknown(c, sel)
		}
		if r.Home != (Target{}) && c.Target == r.Home {
			sel.Home = i
		}
	}
	if sel.Unknown > 0 {
		sel.assume()
	}
	for i := range sel.Candidates {
		sel.Awaiting += sel.Candidates[i].Awaiting
	}
}

// fill sets the terms of a candidate from its target's load. The lock is held.
func (s *Scheduler) fill(now time.Time, r *Request, ld *load, c *Candidate, sel *Selection) {
	if len(ld.due) > 0 {
		ld.settle(now)
	}
	if ld.slot < len(s.match.Held) && s.match.Held[ld.slot] > 0 {
		s.overlap(r, ld, sel.Tokens, c)
	}
	c.PrefillTokens = ld.prefill
	if ld.requests > 0 {
		c.PromptBlocks = s.promptBlocks(ld)
	}
	c.UnsharedBlocks = ld.unshared
	c.OutputBlocks = max(0, float64(ld.output)-ld.faded)
	c.Requests = ld.requests
	s.predict(now, ld, c, sel)
}

// assume gives the candidates whose load is unknown the medians of the others':
// unknown is not idle.
func (s *Selection) assume() {
	assume(s, func(c *Candidate) *int64 { return &c.PrefillTokens })
	assume(s, func(c *Candidate) *float64 { return &c.PromptBlocks })
	assume(s, func(c *Candidate) *float64 { return &c.UnsharedBlocks })
	assume(s, func(c *Candidate) *float64 { return &c.OutputBlocks })
	assume(s, func(c *Candidate) *int { return &c.Requests })
	assume(s, func(c *Candidate) *int { return &c.Awaiting })
	assume(s, func(c *Candidate) *float64 { return &c.WaitTime })
	assume(s, func(c *Candidate) *float64 { return &c.RecentWork })
}

func assume[T int | int64 | float64](s *Selection, term func(*Candidate) *T) {
	known := make([]T, 0, len(s.Candidates))
	for i := range s.Candidates {
		if c := &s.Candidates[i]; !c.Unknown {
			known = append(known, *term(c))
		}
	}
	if len(known) == 0 {
		return
	}
	slices.Sort(known)
	median := (known[(len(known)-1)/2] + known[len(known)/2]) / 2
	for i := range s.Candidates {
		if c := &s.Candidates[i]; c.Unknown {
			*term(c) = median
		}
	}
}

// book makes the lease. The lock is held.
func (s *Scheduler) book(now time.Time, r *Request, t TargetRef, tokens int64, c *Candidate, sel *Selection) *Lease {
	ld := s.loadOf(t)
	if ld == nil {
		ld = s.declare(t.Target, 0)
	}
	prefill := max(0, tokens-c.OverlapTokens)
	l := &Lease{
		scheduler: s, load: ld, restarts: ld.restarts, booked: now,
		chain: r.chain(), blocks: len(r.Blocks), held: c.HeldBlocks, mediaEnd: r.MediaEnd,
		estimate: r.Tokens - r.OtherTokens, tokens: tokens,
		blockSize: int64(s.settings.BlockSize), streamed: r.Streamed, expected: r.ExpectedTokens,
		prefill: prefill, unshared: c.RequestBlocks,
		work: workOf(prefill, c.OverlapTokens), cached: c.OverlapTokens,
		inFlight: c.SharedBlocks > 0, queued: ld.awaiting.n > 0, predicted: c.WaitTime + c.PrefillTime,
	}
	l.total = blocksOf(l.tokens, l.blockSize)
	s.traffic.arrived(sel)
	ld.recent.add(now, c.PrefillTime)
	if ld.applied != s.learned {
		s.applyCapacity(ld)
	}
	s.acquire(l, r.Blocks)
	s.addLoad(l, now)
	return l
}

// acquire makes the cache model of the lease's target hold the prompt. The lock is held.
func (s *Scheduler) acquire(l *Lease, blocks []uint64) {
	ref, tracked := s.index.Acquire(l.load.slot, &l.chain)
	l.ref, l.whole = ref, tracked == len(blocks)
	if !l.whole {
		l.untracked = l.unshared * float64(len(blocks)-tracked) / float64(len(blocks))
		s.untracked++
	}
	l.chain.Blocks = nil // the request's own
}

// addLoad adds the lease to the load of its target. The lock is held.
func (s *Scheduler) addLoad(l *Lease, now time.Time) {
	ld := l.load
	ld.requests++
	ld.unshared += l.unshared
	ld.untracked += l.untracked
	ld.prefill += l.prefill
	if l.prefill > 0 {
		ld.awaiting.push(l, now)
		l.isAwaiting = true
	}
	if !l.streamed {
		ld.expect(l, now.Add(time.Duration(l.predicted*float64(time.Millisecond))))
	}
	s.leases.push(l)
	s.live++
}
