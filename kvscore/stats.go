package kvscore

import "time"

// Stats are the totals of a scheduler.
type Stats struct {
	// Leases are those that have not ended; Expired counts those that had to
	// be ended by Expire, ever.
	Leases  int
	Expired uint64
	// Untracked counts the leases, ever, whose prompt did not go into the
	// mirror whole, for its capacity or memory was in use. Their blocks are
	// booked all the same, but those that they share count for each of them.
	Untracked uint64
	// PolicyFaults counts the choices, ever, that a policy spoilt: see
	// Selection.Fault.
	PolicyFaults uint64
	// PrefillRate is the prefill rate learned over all targets in tokens a
	// second, waiting included; 0 while nothing is learned.
	PrefillRate float64
	// IndexBytes and IndexBlocks are the size of the index.
	IndexBytes, IndexBlocks int64
}

// Stats returns the totals.
func (s *Scheduler) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{
		Leases: s.live, Expired: s.expired,
		Untracked: s.untracked, PolicyFaults: s.policyFaults,
		PrefillRate: s.rate,
		IndexBytes:  s.index.Bytes(), IndexBlocks: s.index.Blocks(),
	}
}

// Load is what is booked on a target and what its mirror holds.
type Load struct {
	Target        Target
	Requests      int
	PrefillTokens int64
	// PromptBlocks counts those that several requests share once, as far as
	// the mirror has room to track them.
	PromptBlocks   float64
	OutputBlocks   int64
	CachedTokens   int64
	CapacityTokens int64
	// PrefillRate is the prefill rate that the target has shown, in tokens a
	// second, waiting included; 0 while it has shown none, and the rate over
	// all targets is assumed, or the default.
	PrefillRate float64
	// RateInUse is the prefill rate, in tokens a second, that is reckoned with:
	// PrefillRate, or what stands in for it.
	RateInUse float64
}

// Load returns the books of a target; false if it is not known.
func (s *Scheduler) Load(now time.Time, t Target) (Load, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.targets[t]
	if b == nil {
		return Load{Target: t}, false
	}
	b.settle(now)
	return Load{
		Target: t, Requests: b.requests, PrefillTokens: b.prefill,
		PromptBlocks:   s.promptBlocks(b),
		OutputBlocks:   b.output,
		CachedTokens:   s.index.Used(b.slot),
		CapacityTokens: b.capacity,
		PrefillRate:    b.rate,
		RateInUse:      s.rateOf(b),
	}, true
}
