package handler

import (
	"maps"
	"slices"
	"time"
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
	Told    toldView `json:"told"`
	// Contradictions are between Told and the configuration, which counts; null
	// if nothing is told.
	Contradictions []string `json:"contradictions"`
}

// toldView is what the engine tells of itself; null is what it does not.
type toldView struct {
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

func (p *pool) engineView(w *worker) engineView {
	s, told := p.settings.Load(), w.engine.last()
	set := s.worker(w.dial)
	v := engineView{
		Type: known(p.engineOf(w).Type), Source: fromConfig, Version: known(told.Version),
		Told: toldView{
			Type: known(told.Type), KVTokens: known(told.KVTokens), BlockSize: known(told.BlockSize), DPSize: known(told.DPSize),
			ContextTokens: known(told.ContextTokens), MaxRunning: known(told.MaxRunning),
			Priority: known(told.Priority), Eviction: known(told.PriorityEviction), Thinking: known(told.StrictThinking),
		},
	}
	v.Contradictions = slices.Sorted(maps.Values(s.contradictions(set, told)))
	if v.Contradictions == nil && told.Type != "" {
		v.Contradictions = []string{}
	}
	switch {
	case set.Engine != engineAuto:
	case v.Type != nil:
		v.Source = fromEngine
	default:
		v.Source = fromNowhere
	}
	if !told.Started.IsZero() {
		started := told.Started.UTC()
		v.Told.Started = &started
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

func (p *pool) rankViews(t time.Time, w *worker) []rankView {
	list := make([]rankView, 0, w.ranks())
	for rank := range w.ranks() {
		l, _ := p.scheduler.Load(t, w.target(rank))
		list = append(list, rankView{
			Rank: rank, Load: rankLoad{l.Requests, l.PrefillTokens, l.PromptBlocks, l.OutputBlocks},
			Cache: p.viewCache(w, &l), Prefill: rateView{l.RateInUse, l.PrefillRate > 0}, Latency: viewSpeed(t, &l),
		})
	}
	return list
}

// blocksFrom says where the size of the blocks that are compared comes from.
func (p *pool) blocksFrom() string {
	p.mu.RLock()
	defer p.mu.RUnlock()
	switch {
	case !p.settings.Load().openBlocks:
		return fromConfig
	case p.blockSize > 0:
		return fromEngine
	}
	return "default"
}
