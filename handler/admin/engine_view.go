package admin

import (
	"maps"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
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
	Type    string      `json:"type,omitzero"`
	Source  string      `json:"source"`
	Version string      `json:"version,omitzero"`
	Info    engine.Info `json:"info"`
	// Contradictions are between Info and the configuration, which counts; null if
	// the engine has reported nothing.
	Contradictions []string `json:"contradictions"`
	// Warnings are settings of the engine that keep the router from routing well.
	Warnings []pool.Warning `json:"warnings"`
}

func viewEngine(p *pool.Pool, w *pool.Worker) engineView {
	e := w.Engine()
	info := e.Info
	info.Started = info.Started.UTC()
	v := engineView{
		Type: e.Type, Source: fromConfig, Version: info.Version, Info: info,
		Contradictions: slices.Sorted(maps.Values(discovery.Contradictions(p, w))), Warnings: discovery.Warnings(p, w, time.Now()),
	}
	if v.Contradictions == nil && info.Type != "" {
		v.Contradictions = []string{}
	}
	switch {
	case p.Settings.Load().Worker(w.Dial).Engine != pool.EngineAuto:
	case v.Type != "":
		v.Source = fromEngine
	default:
		v.Source = fromNowhere
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

// rankView is one data-parallel rank of a worker.
type rankView struct {
	Rank int `json:"dp_rank"`
	kvscore.Load
	// EngineLoad is absent if the engine has not reported its load lately.
	EngineLoad *engineLoadView `json:"engine_load,omitzero"`
}

// engineLoadView is the load that an engine reports of a rank.
type engineLoadView struct {
	kvscore.EngineLoad
	WaitingTokens *int64 `json:"waiting_tokens,omitzero"`
	// Foreign is what other clients than the router have of these requests.
	Foreign int     `json:"other_clients_requests"`
	Age     float64 `json:"age_seconds"`
}

func viewEngineLoad(t time.Time, l *kvscore.Load) *engineLoadView {
	if l.EngineAt.IsZero() {
		return nil
	}
	v := &engineLoadView{EngineLoad: l.Engine, Foreign: l.External, Age: t.Sub(l.EngineAt).Seconds()}
	if l.Engine.WaitingTokens >= 0 {
		v.WaitingTokens = &l.Engine.WaitingTokens
	}
	return v
}

func viewRanks(p *pool.Pool, t time.Time, w *pool.Worker) []rankView {
	list := make([]rankView, 0, w.Ranks())
	for rank := range w.Ranks() {
		l, _ := p.Scheduler.Load(t, w.Target(rank))
		v := rankView{Rank: rank, Load: l, EngineLoad: viewEngineLoad(t, &l)}
		v.Room = roomOf(p, w, &l)
		list = append(list, v)
	}
	return list
}

// roomOf leaves out the reported capacity if neither the configuration nor the engine says it.
func roomOf(p *pool.Pool, w *pool.Worker, l *kvscore.Load) kvscore.Room {
	room := l.Room
	if p.Settings.Load().Worker(w.Dial).KVTokens == 0 && w.Engine().Info.KVTokens == 0 {
		room.ReportedTokens = 0
	}
	return room
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
	// Answer is the mean length of an answer.
	Answer float64 `json:"expected_answer_tokens,omitzero"`
}

func viewLatency(s *kvscore.Stats) latencyView {
	l := &s.Latency
	v := latencyView{
		Fixed: l.Fixed, Tokens: l.Token * 1e3, Attention: l.Attention * 1e6, Context: l.Context * 1e3,
		Timings: s.Timings, Answer: s.ExpectedAnswer,
	}
	return v
}
