package kvscore

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Stats are totals over all targets.
type Stats struct {
	// Leases is the number of leases that have not ended.
	Leases int `json:"leases"`
	Totals `json:"totals"`
	// PrefillRate is the learned prefill rate over all targets for a prompt of 4096 tokens,
	// in tokens per second; 0 while nothing is learned.
	PrefillRate float64 `json:"prefill_tokens_per_second,omitzero"`
	// Latency are the learned coefficients of prefill times. Timings is the number of
	// samples.
	Latency Latency `json:"-"`
	Timings uint64  `json:"-"`
	// ExpectedAnswer is the mean length of an answer in tokens, 0 while none has ended.
	ExpectedAnswer float64 `json:"-"`
	cache.Size
}

// Totals count since the scheduler was made.
type Totals struct {
	// Expired are the leases that Expire has ended.
	Expired uint64 `json:"expired_leases"`
	// Untracked are the leases whose prompt did not fit into the cache model, because its
	// capacity or memory was in use. Their blocks are booked, but shared ones count for
	// each lease.
	Untracked uint64 `json:"untracked_prompts"`
	// PolicyFaults are the invalid choices: see Selection.Fault.
	PolicyFaults uint64 `json:"policy_faults"`
}

// Stats returns the totals.
func (s *Scheduler) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	stats := Stats{
		Leases: len(s.leases), Size: s.caches.Size(), Totals: s.totals, Latency: s.latency.latency(), Timings: s.latency.samples,
	}
	if s.traffic.answers > 0 {
		stats.ExpectedAnswer = s.traffic.answer
	}
	if stats.Timings > 0 {
		stats.PrefillRate = s.latency.rate(1)
	}
	return stats
}

// Load is the current load of one target.
type Load struct {
	Target       Target `json:"-"`
	Booked       `json:"load"`
	Capacity     `json:"cache"`
	PrefillSpeed `json:"prefill"`
	Accuracy     `json:"latency"`
	// Knowledge says whether requests of token ids use the engine's events.
	Knowledge Knowledge `json:"-"`
	// Engine is the load that the engine reported at EngineAt, which is zero if that is too
	// long ago. External is the number of requests of other clients in it. Booked does not
	// include them.
	Engine   EngineLoad `json:"-"`
	EngineAt time.Time  `json:"-"`
	External int        `json:"-"`
	// Errors is the share of errors and empty answers in the last ones, without clients' mistakes.
	Errors float64 `json:"-"`
}

// ErrorsApart returns whether errors and empty answers make the target's worker an outlier.
func (l *Load) ErrorsApart() bool { return l.Outlier && l.Errors > mostly }

// Booked is what leases have booked on a target.
type Booked struct {
	Requests int `json:"requests"`
	// Remote are those of Requests that other routers have sent.
	Remote        int   `json:"other_routers_requests,omitzero"`
	PrefillTokens int64 `json:"prefill_tokens"`
	// PromptBlocks counts shared blocks once, if the cache model has room to track them.
	PromptBlocks float64 `json:"prompt_blocks"`
	OutputBlocks int64   `json:"output_blocks"`
	// Outlier says that a choice of the last minute took the target for an outlier: see
	// [Candidate]. Its load then counts for at least the median of the others'.
	Outlier bool `json:"outlier,omitzero"`
}

// Capacity is the size of a target's KV cache, and what the cache model holds of it.
type Capacity struct {
	// CapacityTokens is the capacity of the cache model. The scheduler learns it from the
	// cached tokens that the engine reports. It starts at ReportedTokens, the declared capacity.
	CapacityTokens  int64 `json:"capacity_tokens"`
	ReportedTokens  int64 `json:"capacity_reported_tokens,omitzero"`
	CapacityLearned bool  `json:"capacity_learned"`
	CachedTokens    int64 `json:"cached_tokens"`
}

// PrefillSpeed is how fast a target computes prompts.
type PrefillSpeed struct {
	// PrefillRate is the predicted prefill rate for a prompt of 4096 tokens, in tokens
	// per second. Until it is learned, it is the pool's rate or the default.
	PrefillRate float64 `json:"tokens_per_second"`
	RateLearned bool    `json:"learned"`
}

// Accuracy is how a target's times differ from the predictions.
type Accuracy struct {
	// Slowness is the target's prefill time divided by the pool's prediction, 0 without
	// samples. Timings is the number of samples, LastTiming the age of the last one in seconds.
	Slowness   float64 `json:"slowness,omitzero"`
	Timings    uint64  `json:"timings"`
	LastTiming float64 `json:"last_timing_seconds_ago,omitzero"`
	// ErrorMedian and ErrorP90 are quantiles of the relative error of predicted times to the
	// first token, |observed/predicted - 1|. Predictions is their number, at most 64.
	Predictions int     `json:"ttft_predictions"`
	ErrorMedian float64 `json:"ttft_error_median,omitzero"`
	ErrorP90    float64 `json:"ttft_error_p90,omitzero"`
}

// Load returns the load of a target, and false if the target is unknown.
func (s *Scheduler) Load(now time.Time, t Target) (Load, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ld := s.targets[t]
	if ld == nil {
		return Load{Target: t}, false
	}
	ld.endDue(now)
	median, p90, n := ld.errors.quantiles()
	slowness := ld.speed.factor(now)
	l := Load{
		Target: t,
		Booked: Booked{
			Requests: ld.requests, Remote: ld.remote, PrefillTokens: ld.prefill,
			PromptBlocks: ld.promptBlocks(s.settings.BlockSize), OutputBlocks: ld.output,
			Outlier: now.Sub(ld.answers.found) < outlierShown,
		},
		Capacity: Capacity{
			CapacityTokens: ld.capacity, ReportedTokens: ld.declared, CapacityLearned: ld.capacity != ld.declared,
			CachedTokens: ld.slot.Used(),
		},
		PrefillSpeed: PrefillSpeed{PrefillRate: s.latency.rate(slowness), RateLearned: ld.timings > 0},
		Accuracy:     Accuracy{Timings: ld.timings, Predictions: n, ErrorMedian: median, ErrorP90: p90},
		Knowledge:    ld.slot.Knowledge(),
		Errors:       ld.answers.errors.v,
	}
	if ld.timings > 0 {
		l.Slowness, l.LastTiming = slowness, now.Sub(ld.lastTiming).Seconds()
	}
	if f := ld.external; f.counts(now) {
		l.Engine, l.EngineAt, l.External = f.reported, f.at, f.rest.requests
	}
	return l, true
}

// rate returns the prefill rate for prompts of a few thousand tokens, in tokens a second. factor
// is the slowness of the target.
func (e *estimator) rate(factor float64) float64 {
	const tokens = 4096
	return tokens * 1e3 / max(factor*e.predict(featuresOf(1, workOf(tokens, 0), 0)), 1e-3)
}
