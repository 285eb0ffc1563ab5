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
}

// chooseAgain bounds how often a choice is made anew because another request
// was booked meanwhile.
const chooseAgain = 2

// Select lets the policy choose among targets and books the request on the
// chosen one. It returns the chosen position, and the lease; -1 and nil if
// there are no targets. bound is the position of the target that the choice is
// already made for, negative if it is not; the candidates' terms are filled in
// all the same. sel keeps the terms of the choice; it is the caller's, to be
// used again.
//
// If the policy returns no position of a candidate, the first target is taken
// (see Stats.PolicyFaults). If it panics, nothing is booked.
func (s *Scheduler) Select(now time.Time, r *Request, targets []Target, bound int, p Policy, sel *Selection) (int, *Lease) {
	sel.Dry = false
	if len(targets) == 0 {
		return -1, nil
	}
	if bound >= 0 && bound < len(targets) {
		return bound, s.selectBound(now, r, targets, bound, sel)
	}
	for try := 0; ; try++ {
		seen := s.look(now, r, targets, sel)
		// the policy may be anybody's: it runs without the lock
		c := choice{p.Choose(sel), seen, try == chooseAgain}
		if i, l := s.commit(now, r, targets, c, sel); l != nil {
			return i, l
		}
	}
}

func (s *Scheduler) selectBound(now time.Time, r *Request, targets []Target, bound int, sel *Selection) *Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.snapshot(now, r, targets, sel)
	return s.book(now, r, targets[bound], sel.Tokens, &sel.Candidates[bound])
}

// choice is a chosen position and the number of bookings that the choice takes
// into account. It may be final, whatever was booked since.
type choice struct {
	position int
	seen     uint64
	final    bool
}

// look fills in sel and returns its age, in bookings.
func (s *Scheduler) look(now time.Time, r *Request, targets []Target, sel *Selection) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.snapshot(now, r, targets, sel)
	return s.bookings
}

// commit books the request on the chosen target, unless the choice should be
// made anew, for requests that arrive together would all choose the same one.
func (s *Scheduler) commit(now time.Time, r *Request, targets []Target, c choice, sel *Selection) (int, *Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bookings != c.seen && len(targets) > 1 {
		if !c.final {
			return -1, nil
		}
		s.staleChoices++
	}
	i := c.position
	if i < 0 || i >= len(targets) || len(sel.Candidates) != len(targets) {
		s.policyFaults++
		i = 0
		s.snapshot(now, r, targets, sel) // the policy may have spoilt it
	}
	return i, s.book(now, r, targets[i], sel.Tokens, &sel.Candidates[i])
}

// snapshot fills in sel for the request. The lock is held.
func (s *Scheduler) snapshot(now time.Time, r *Request, targets []Target, sel *Selection) {
	chain := r.chain()
	s.index.Match(&chain, &s.match)
	sel.Tokens, sel.RequestBlocks = s.measure(r, &chain)
	sel.Known, sel.KnownBlocks, sel.KnownTokens = s.match.Known, s.match.Blocks, s.match.KnownTokens
	sel.BlockSize, sel.Override = s.settings.BlockSize, r.Override
	scale := sel.RequestBlocks / max(1, float64(len(r.Blocks))) // KV blocks in one of the request's blocks
	sel.Root, sel.Blocks, sel.NominalBlockTokens = r.Root, r.Blocks, r.NominalBlockTokens
	if sel.NominalBlockTokens == 0 {
		sel.NominalBlockTokens = r.BlockTokens
	}
	sel.Stems = sel.Stems[:0]
	for _, m := range s.match.Stems {
		sel.Stems = append(sel.Stems, Stem{Blocks: float64(m.Blocks) * scale, Arrivals: m.Arrivals, Holders: m.Holders})
	}
	sel.Candidates = slices.Grow(sel.Candidates[:0], len(targets))
	for i, t := range targets {
		c := Candidate{Target: t, RequestBlocks: sel.RequestBlocks}
		if i < len(r.Factors) {
			c.Factor = r.Factors[i]
		}
		if b := s.targets[t]; b != nil { // else it holds nothing, and becomes known when it is booked
			b.settle(now)
			s.overlap(r, b, sel.Tokens, &c)
			c.PrefillTokens = b.prefill
			c.PromptBlocks = s.promptBlocks(b)
			c.UnsharedBlocks = b.unshared
			c.OutputBlocks = max(0, float64(b.output)-b.faded)
			c.Requests = b.requests
		}
		sel.Candidates = append(sel.Candidates, c)
	}
}

// book makes the lease. The lock is held.
func (s *Scheduler) book(now time.Time, r *Request, t Target, tokens int64, c *Candidate) *Lease {
	b := s.targets[t]
	if b == nil {
		b = s.declare(t, 0)
	}
	s.bookings++
	l := &Lease{
		scheduler: s, books: b, restarts: b.restarts, booked: now,
		chain:  r.chain(),
		tokens: tokens, prefill: max(0, tokens-c.OverlapTokens),
		unshared:  c.RequestBlocks,
		blockSize: int64(s.settings.BlockSize),
		streamed:  r.Streamed,
		expected:  r.ExpectedTokens,
	}
	if l.prefill > 0 {
		l.wait = b.prefill + l.prefill
	}
	l.total = blocksOf(l.tokens, l.blockSize)
	l.seen.Store(now.UnixNano())
	var tracked int
	if l.ref, tracked = s.index.Acquire(b.slot, &l.chain); tracked < len(r.Blocks) {
		l.untracked = c.RequestBlocks * float64(len(r.Blocks)-tracked) / float64(len(r.Blocks))
		s.untracked++
	}
	l.whole, l.held = tracked == len(r.Blocks), c.HeldBlocks
	l.chain.Blocks = nil
	b.requests++
	b.unshared += l.unshared
	b.untracked += l.untracked
	b.prefill += l.prefill
	if !r.Streamed && l.prefill > 0 {
		b.expect(l, now.Add(s.prefillTime(b, l.wait)))
	}
	s.leases.push(l)
	s.live++
	return l
}
