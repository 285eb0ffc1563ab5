package admin

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// latencyView is what the pool has learned of prefill times and of its traffic. The
// coefficients begin with assumptions, which hold while Timings is 0.
type latencyView struct {
	Fixed     float64 `json:"step_ms"`
	Tokens    float64 `json:"per_1000_tokens_ms"`
	Attention float64 `json:"per_million_token_pairs_ms"`
	Context   float64 `json:"per_1000_context_tokens_ms"`
	Timings   uint64  `json:"timings"`
	// Turns is how many further turns a new conversation has, Answer the mean length
	// of an answer.
	Turns  *float64 `json:"expected_turns"`
	Answer *float64 `json:"expected_answer_tokens"`
}

func viewLatency(s *kvscore.Stats) latencyView {
	l := &s.Latency
	v := latencyView{Fixed: l.Fixed, Tokens: l.Token * 1e3, Attention: l.Attention * 1e6, Context: l.Context * 1e3, Timings: s.Timings}
	if s.ExpectedAnswer > 0 {
		v.Answer = &s.ExpectedAnswer
	}
	if s.ExpectedTurns > 0 || s.ExpectedAnswer > 0 {
		v.Turns = &s.ExpectedTurns
	}
	return v
}

// speedView is how fast a target is, and how well that is predicted.
type speedView struct {
	// Slowness is how many times longer than the pool predicts a prefill takes; null
	// while there were no timings.
	Slowness   *float64 `json:"slowness"`
	Timings    uint64   `json:"timings"`
	LastTiming *float64 `json:"last_timing_seconds_ago"`
	// Predictions is how many of the last first tokens the errors are of. An error is
	// |observed / predicted − 1|.
	Predictions int      `json:"ttft_predictions"`
	Median      *float64 `json:"ttft_error_median"`
	P90         *float64 `json:"ttft_error_p90"`
}

func viewSpeed(t time.Time, l *kvscore.Load) *speedView {
	v := &speedView{Timings: l.Timings, Predictions: l.Predictions}
	if slowness, age := l.Slowness, t.Sub(l.LastTiming).Seconds(); l.Timings > 0 {
		v.Slowness, v.LastTiming = &slowness, &age
	}
	if median, p90 := l.ErrorMedian, l.ErrorP90; l.Predictions > 0 {
		v.Median, v.P90 = &median, &p90
	}
	return v
}

// cacheSize is the capacity of a target's KV cache and what it is thought to hold.
type cacheSize struct {
	// Capacity is the one in use; it is learned from the cached tokens that the engine
	// reports, beginning with Told or a default.
	Capacity int64 `json:"capacity_tokens"`
	// Told is what the configuration says, or else the engine; null if neither does.
	Told    *int64 `json:"capacity_told_tokens"`
	Learned bool   `json:"capacity_learned"`
	Cached  int64  `json:"cached_tokens"`
}

func viewCache(p *pool.Pool, w *pool.Worker, l *kvscore.Load) cacheSize {
	v := cacheSize{Capacity: l.CapacityTokens, Learned: l.CapacityTokens != l.ToldTokens, Cached: l.CachedTokens}
	if told := l.ToldTokens; p.Settings.Load().Worker(w.Dial).KVTokens > 0 || w.Engine.Info().KVTokens > 0 {
		v.Told = &told
	}
	return v
}
