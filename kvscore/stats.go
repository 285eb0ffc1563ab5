package kvscore

import "time"

// Stats are the totals of a scheduler.
type Stats struct {
	// Leases is the number of leases that have not ended. Expired is the total number
	// that Expire has ended.
	Leases  int
	Expired uint64
	// Untracked is the total number of leases whose prompt did not fit into the cache
	// model, because its capacity or memory was in use. Their blocks are booked, but
	// shared ones count for each lease.
	Untracked uint64
	// PolicyFaults is the total number of invalid choices: see Selection.Fault.
	PolicyFaults uint64
	// PrefillRate is the learned prefill rate over all targets for a prompt of 4096 tokens,
	// in tokens per second; 0 while nothing is learned.
	PrefillRate float64
	// Latency are the learned coefficients of prefill times. Timings is the number of
	// samples.
	Latency Latency
	Timings uint64
	// ExpectedTurns is the average number of further turns of a new conversation.
	// ExpectedAnswer is the mean length of an answer in tokens, 0 while none has ended.
	ExpectedTurns, ExpectedAnswer float64
	// IndexBytes and IndexBlocks are the size of the index in bytes and blocks.
	IndexBytes, IndexBlocks int64
	// ExactBytes and ExactBlocks are those of the index from events. ExactBytes includes the
	// prompts in flight.
	ExactBytes, ExactBlocks int64
}

// Stats returns the totals.
func (s *Scheduler) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := s.caches.Size()
	stats := Stats{
		Leases: s.live, Expired: s.expired,
		Untracked: s.untracked, PolicyFaults: s.policyFaults,
		Latency: s.latency.latency(), Timings: s.latency.samples,
		ExpectedTurns: s.traffic.turns(), ExpectedAnswer: s.traffic.meanAnswer(),
		IndexBytes: size.SentBytes, IndexBlocks: size.SentBlocks,
		ExactBytes: size.ExactBytes, ExactBlocks: size.ExactBlocks,
	}
	if stats.Timings > 0 {
		stats.PrefillRate = s.latency.rate(1)
	}
	return stats
}

// Load is the load of a target, and the state of its cache model. It has many fields
// because it is one row of the admin API and of the metrics.
type Load struct {
	Target        Target
	Requests      int
	PrefillTokens int64
	// PromptBlocks counts shared blocks once, if the cache model has room to track them.
	PromptBlocks float64
	OutputBlocks int64
	CachedTokens int64
	// Knowledge says whether requests of token ids use the engine's events.
	Knowledge Knowledge
	// CapacityTokens is the capacity of the cache model. The scheduler learns it from the
	// cached tokens that the engine reports. It starts at ReportedTokens, the declared capacity.
	CapacityTokens, ReportedTokens int64
	// Slowness is the target's prefill time divided by the pool's prediction. Timings is
	// the number of samples, LastTiming the time of the last one.
	Slowness   float64
	Timings    uint64
	LastTiming time.Time
	// ErrorMedian and ErrorP90 are quantiles of the relative error of predicted times to the
	// first token, |observed/predicted - 1|. Predictions is their number, at most 64.
	ErrorMedian, ErrorP90 float64
	Predictions           int
	// Engine is the load that the engine reported at EngineAt, which is zero if that is too
	// long ago. Foreign is the number of requests of other clients in it. The fields above
	// do not include them.
	Engine   EngineLoad
	EngineAt time.Time
	Foreign  int
	// PrefillRate is the predicted prefill rate for a prompt of 4096 tokens, in tokens
	// per second. While Timings is 0, it is the pool's rate or the default.
	PrefillRate float64
}

// Load returns the load of a target, and false if the target is unknown.
func (s *Scheduler) Load(now time.Time, t Target) (Load, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ld := s.targets[t]
	if ld == nil {
		return Load{Target: t}, false
	}
	ld.settle(now)
	median, p90, n := ld.errors.quantiles()
	l := Load{
		ReportedTokens: ld.declared, Slowness: ld.speed.factor(now), Timings: ld.timings, LastTiming: ld.lastTiming,
		ErrorMedian: median, ErrorP90: p90, Predictions: n,
		Target: t, Requests: ld.requests, PrefillTokens: ld.prefill,
		PromptBlocks: ld.promptBlocks(s.settings.BlockSize),
		OutputBlocks: ld.output,
		CachedTokens: ld.slot.Used(), Knowledge: ld.slot.Knowledge(),
		CapacityTokens: ld.capacity,
		PrefillRate:    s.latency.rate(ld.speed.factor(now)),
	}
	if f := ld.foreign; f.counts(now) {
		l.Engine, l.EngineAt, l.Foreign = f.reported, f.at, f.rest.requests
	}
	return l, true
}

// rate returns the prefill rate for prompts of a few thousand tokens, in tokens a second. factor
// is the slowness of the target.
func (e *estimator) rate(factor float64) float64 {
	const tokens = 4096
	return tokens * 1e3 / max(factor*e.predict(featuresOf(1, workOf(tokens, 0), 0)), 1e-3)
}
