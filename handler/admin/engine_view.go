package admin

import (
	"maps"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// The sources of what is known of an engine.
const (
	fromConfig  = "configured"
	fromEngine  = "found"
	fromNowhere = "unknown"
)

// engineView is the engine behind a worker, as the admin API shows it.
type engineView struct {
	Type    *string  `json:"type"`
	Source  string   `json:"source"`
	Version *string  `json:"version"`
	Info    infoView `json:"info"`
	// Contradictions are between Info and the configuration, which counts; null if
	// the engine has reported nothing.
	Contradictions []string `json:"contradictions"`
	// Warnings are settings of the engine that keep the router from routing well.
	Warnings []pool.Warning `json:"warnings"`
}

// infoView is what the engine reports about itself; null for what it does not
// report.
type infoView struct {
	Type          *string    `json:"type"`
	KVTokens      *int64     `json:"kv_tokens_per_rank"`
	BlockSize     *int       `json:"block_size_tokens"`
	DPSize        *int       `json:"dp_size"`
	ContextTokens *int64     `json:"context_tokens"`
	MaxRunning    *int       `json:"max_running_requests_per_rank"`
	Priority      *bool      `json:"priority_scheduling"`
	Eviction      *bool      `json:"priority_eviction"`
	Thinking      *bool      `json:"strict_thinking"`
	Started       *time.Time `json:"started"`
}

func viewEngine(p *pool.Pool, w *pool.Worker) engineView {
	s, info := p.Settings.Load(), w.Engine().Info
	set := s.Worker(w.Dial)
	v := engineView{
		Type: known(w.Engine().Type), Source: fromConfig, Version: known(info.Version),
		Contradictions: slices.Sorted(maps.Values(discovery.Of(w).Contradictions())), Warnings: discovery.Of(w).Warnings(time.Now()),
		Info: infoView{
			Type: known(info.Type), KVTokens: known(info.KVTokens), BlockSize: known(info.BlockSize), DPSize: known(info.DPSize),
			ContextTokens: known(info.ContextTokens), MaxRunning: known(info.MaxRunning),
			Priority: known(info.Priority), Eviction: known(info.PriorityEviction), Thinking: known(info.StrictThinking),
		},
	}
	if v.Contradictions == nil && info.Type != "" {
		v.Contradictions = []string{}
	}
	switch {
	case set.Engine != pool.EngineAuto:
	case v.Type != nil:
		v.Source = fromEngine
	default:
		v.Source = fromNowhere
	}
	if !info.Started.IsZero() {
		started := info.Started.UTC()
		v.Info.Started = &started
	}
	return v
}

// limitSource returns the source of a worker's limit of requests.
func limitSource(set pool.WorkerSettings, limit int64) string {
	switch {
	case set.MaxRunning == 0:
		return "default"
	case set.MaxRunning != pool.LimitAuto:
		return fromConfig
	case limit > 0:
		return fromEngine
	}
	return fromNowhere
}

// known returns nil for the zero value, which means unknown.
func known[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

// rankView is one data-parallel rank of a worker.
type rankView struct {
	Rank    int        `json:"dp_rank"`
	Load    rankLoad   `json:"load"`
	Cache   cacheSize  `json:"cache"`
	Prefill rateView   `json:"prefill"`
	Latency *speedView `json:"latency"`
	// EngineLoad is null if the engine has not reported its load lately.
	EngineLoad *engineLoadView `json:"engine_load"`
}

// engineLoadView is the load that an engine reports of a rank.
type engineLoadView struct {
	Running       int    `json:"running_requests"`
	Waiting       int    `json:"waiting_requests"`
	WaitingTokens *int64 `json:"waiting_tokens"`
	// Foreign is what other clients than the router have of these requests.
	Foreign int     `json:"other_clients_requests"`
	Age     float64 `json:"age_seconds"`
}

func viewEngineLoad(t time.Time, l *kvscore.Load) *engineLoadView {
	if l.EngineAt.IsZero() {
		return nil
	}
	v := &engineLoadView{Running: l.Engine.Running, Waiting: l.Engine.Waiting, Foreign: l.Foreign, Age: t.Sub(l.EngineAt).Seconds()}
	if l.Engine.WaitingTokens >= 0 {
		v.WaitingTokens = &l.Engine.WaitingTokens
	}
	return v
}

type rankLoad struct {
	Requests      int     `json:"requests"`
	PrefillTokens int64   `json:"prefill_tokens"`
	PromptBlocks  float64 `json:"prompt_blocks"`
	OutputBlocks  int64   `json:"output_blocks"`
}

func viewLoad(l *kvscore.Load) rankLoad {
	return rankLoad{l.Requests, l.PrefillTokens, l.PromptBlocks, l.OutputBlocks}
}

func viewRanks(p *pool.Pool, t time.Time, w *pool.Worker) []rankView {
	list := make([]rankView, 0, w.Ranks())
	for rank := range w.Ranks() {
		l, _ := p.Scheduler.Load(t, w.Target(rank))
		list = append(list, rankView{
			Rank: rank, Load: viewLoad(&l),
			Cache: viewCache(p, w, &l), Prefill: rateView{l.PrefillRate, l.Timings > 0}, Latency: viewSpeed(t, &l), EngineLoad: viewEngineLoad(t, &l),
		})
	}
	return list
}

// blockSource returns the source of the block size.
func blockSource(p *pool.Pool, set *pool.Settings) string {
	switch {
	case !set.BlockSizeUnset:
		return fromConfig
	case p.KnowsBlockSize():
		return fromEngine
	}
	return "default"
}

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
	v.Answer = known(s.ExpectedAnswer)
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
	if l.Timings > 0 {
		v.Slowness, v.LastTiming = new(l.Slowness), new(t.Sub(l.LastTiming).Seconds())
	}
	if l.Predictions > 0 {
		v.Median, v.P90 = new(l.ErrorMedian), new(l.ErrorP90)
	}
	return v
}

// cacheSize is the capacity of a target's KV cache and what it is thought to hold.
type cacheSize struct {
	// Capacity is the one in use; it is learned from the cached tokens that the engine
	// reports, beginning with Reported or a default.
	Capacity int64 `json:"capacity_tokens"`
	// Reported is the configured capacity, else what the engine reports; null if unknown.
	Reported *int64 `json:"capacity_reported_tokens"`
	Learned  bool   `json:"capacity_learned"`
	Cached   int64  `json:"cached_tokens"`
}

func viewCache(p *pool.Pool, w *pool.Worker, l *kvscore.Load) cacheSize {
	v := cacheSize{Capacity: l.CapacityTokens, Learned: l.CapacityTokens != l.ReportedTokens, Cached: l.CachedTokens}
	if p.Settings.Load().Worker(w.Dial).KVTokens > 0 || w.Engine().Info.KVTokens > 0 {
		v.Reported = new(l.ReportedTokens)
	}
	return v
}
