package admin

import (
	"maps"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Where something that is known of an engine comes from.
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
	// the engine has told nothing.
	Contradictions []string `json:"contradictions"`
}

// infoView is what the engine tells of itself, null what it does not.
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
	s, info := p.Settings.Load(), w.Engine.Info()
	set := s.Worker(w.Dial)
	v := engineView{
		Type: known(p.EngineOf(w).Type), Source: fromConfig, Version: known(info.Version),
		Info: infoView{
			Type: known(info.Type), KVTokens: known(info.KVTokens), BlockSize: known(info.BlockSize), DPSize: known(info.DPSize),
			ContextTokens: known(info.ContextTokens), MaxRunning: known(info.MaxRunning),
			Priority: known(info.Priority), Eviction: known(info.PriorityEviction), Thinking: known(info.StrictThinking),
		},
	}
	v.Contradictions = slices.Sorted(maps.Values(s.Contradictions(set, info)))
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

// known is nil for what is zero, as what is not known is.
func known[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

// orEmpty is the end of known.
func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// rankView is one data-parallel rank of a worker.
type rankView struct {
	Rank    int        `json:"dp_rank"`
	Load    rankLoad   `json:"load"`
	Cache   cacheSize  `json:"cache"`
	Prefill rateView   `json:"prefill"`
	Latency *speedView `json:"latency"`
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
			Cache: viewCache(p, w, &l), Prefill: rateView{l.PrefillRate, l.Timings > 0}, Latency: viewSpeed(t, &l),
		})
	}
	return list
}

// blockSource returns where the size of the blocks that are compared comes from.
func blockSource(p *pool.Pool, set *pool.Settings) string {
	switch {
	case !set.BlockSizeUnset:
		return fromConfig
	case p.KnowsBlockSize():
		return fromEngine
	}
	return "default"
}
