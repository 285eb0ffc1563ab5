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
	// Latency are the coefficients learned for prefill times, from so many Timings.
	Latency Latency
	Timings uint64
	// ExpectedTurns is how many further turns a new conversation has on average;
	// ExpectedAnswer is the mean length of an answer, in tokens, 0 while none has ended.
	ExpectedTurns, ExpectedAnswer float64
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
		PrefillRate: s.rate(),
		Latency:     s.latency.latency(), Timings: s.latency.samples,
		ExpectedTurns: s.traffic.turns(), ExpectedAnswer: s.traffic.meanAnswer(),
		IndexBytes: s.index.Bytes(), IndexBlocks: s.index.Blocks(),
	}
}

// Load is what is booked on a target and what its mirror holds.
type Load struct {
	Target        Target
	Requests      int
	PrefillTokens int64
	// PromptBlocks counts those that several requests share once, as far as
	// the mirror has room to track them.
	PromptBlocks float64
	OutputBlocks int64
	CachedTokens int64
	// CapacityTokens is what the mirror has room for. It is learned from cached tokens
	// that the engine reports, beginning with ToldTokens, the declared capacity.
	CapacityTokens, ToldTokens int64
	// Slowness is how many times longer than the pool predicts the target takes for a
	// prefill, as its last Timings have shown; LastTiming is when the last one was.
	Slowness   float64
	Timings    uint64
	LastTiming time.Time
	// ErrorMedian and ErrorP90 are quantiles of the error of the predicted times to the
	// first token, |observed/predicted - 1|, over the last Predictions, 64 at most.
	ErrorMedian, ErrorP90 float64
	Predictions           int
	// PrefillRate is the predicted prefill rate for a prompt of 4096 tokens, in tokens
	// per second. While Timings is 0, it is the pool's rate or the default.
	PrefillRate float64
}

// Load returns the books of a target; false if it is not known.
func (s *Scheduler) Load(now time.Time, t Target) (Load, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ld := s.targets[t]
	if ld == nil {
		return Load{Target: t}, false
	}
	ld.settle(now)
	median, p90, n := ld.errors.quantiles()
	return Load{
		ToldTokens: ld.declared, Slowness: ld.speed.factor(now), Timings: ld.timings, LastTiming: ld.lastTiming,
		ErrorMedian: median, ErrorP90: p90, Predictions: n,
		Target: t, Requests: ld.requests, PrefillTokens: ld.prefill,
		PromptBlocks:   s.promptBlocks(ld),
		OutputBlocks:   ld.output,
		CachedTokens:   s.index.Used(ld.slot),
		CapacityTokens: ld.capacity,
		PrefillRate:    s.rateOf(now, ld),
	}, true
}

// rateOf returns the prefill rate of a target for prompts of a few thousand tokens, in
// tokens a second.
func (s *Scheduler) rateOf(now time.Time, ld *load) float64 {
	const tokens = 4096
	ms := ld.speed.factor(now) * s.latency.predict(featuresOf(1, workOf(tokens, 0), 0))
	return tokens * 1e3 / max(ms, 1e-3)
}

// rate returns the rate over all targets, 0 while nothing is learned.
func (s *Scheduler) rate() float64 {
	if s.latency.samples == 0 {
		return 0
	}
	return s.rateOf(time.Time{}, new(load))
}
