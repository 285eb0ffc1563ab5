package admin

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// workerView is a worker, as the admin API, the page and the commands show it. What is not known is absent.
type workerView struct {
	ID              uint64               `json:"id"`
	Dial            string               `json:"dial"`
	State           string               `json:"state"`
	Anomalies       []string             `json:"anomalies"`
	Look            []observe.Warning    `json:"needs_look,omitzero"`
	Static          bool                 `json:"static_upstream"`
	Role            engine.Role          `json:"role"`
	Draining        bool                 `json:"draining"`
	DrainAsked      bool                 `json:"drain_by_admin_api"`
	DrainConfigured bool                 `json:"drain_by_config"`
	Drained         bool                 `json:"drained"`
	Engine          engineView           `json:"engine"`
	Models          modelsView           `json:"models"`
	Taints          []string             `json:"taints,omitzero"`
	Health          healthView           `json:"health"`
	Load            loadView             `json:"load"`
	Cache           cacheView            `json:"cache"`
	Prefill         kvscore.PrefillSpeed `json:"prefill"`
	Latency         *kvscore.Accuracy    `json:"latency,omitzero"`
	Ranks           []rankView           `json:"dp_ranks,omitzero"`
	Recent          recentView           `json:"recent"`
	History         []pointView          `json:"history,omitzero"`

	slowness float64      // of prefills, in relation to the prediction; 0 is unknown
	KVEvents []eventsView `json:"kv_events"`
}

type modelsView struct {
	Configured []string `json:"configured"`
	Listed     []string `json:"listed"`
}

type healthView struct {
	Available         *bool   `json:"available,omitzero"`
	Proxy             *bool   `json:"proxy_available,omitzero"`
	Refusing          *bool   `json:"refuses_connections,omitzero"`
	Hung              bool    `json:"hung"`
	MarkedDownSeconds float64 `json:"marked_down_seconds"`
	LetBack           int     `json:"trial_requests,omitzero"`
	ErrorRatio        float64 `json:"error_ratio"`
	ErrorsApart       bool    `json:"errors_apart"`
	worker.HealthState
}

type loadView struct {
	kvscore.Booked
	Running     int64  `json:"running_requests"`
	MaxRunning  int64  `json:"max_running_requests,omitzero"`
	LimitSource string `json:"max_running_from"`
	Waiting     *int64 `json:"engine_waiting_requests,omitzero"`
}

// cacheView adds shares of the KV cache: what it caches, and what active requests use.
type cacheView struct {
	kvscore.Capacity
	Cached float64 `json:"cached_share"`
	Used   float64 `json:"used_share"`
}

// viewWorkers returns the views of workers, compared with each other, and adds what they did lately to all, and
// by slots to line.
func viewWorkers(p *pool.Pool, workers []*worker.Worker, t time.Time, all *observe.Sums, line []observe.Sums) []workerView {
	proxy, list, sums := proxyOf(p), make([]workerView, 0, len(workers)), make([]observe.Sums, len(workers))
	for i, w := range workers {
		part := slices.Clone(line)
		for slot := range part {
			part[slot] = observe.Sums{Slot: line[slot].Slot}
		}
		w.Past.Recent.Add(t, &sums[i], part)
		all.Add(&sums[i])
		for slot := range line {
			line[slot].Add(&part[slot])
		}
		v := viewWorker(p, w, t, proxy)
		v.Recent, v.History = viewRecent(&sums[i]), viewHistory(part)
		list = append(list, v)
	}
	findAnomalies(list, sums)
	return list
}

func sortedWorkers(p *pool.Pool) []*worker.Worker {
	all := p.All()
	slices.SortFunc(all, func(a, b *worker.Worker) int { return cmp.Compare(a.Dial, b.Dial) })
	return all
}

// proxyState is what Caddy's proxy says of a static upstream.
type proxyState struct {
	available bool
	healthy   bool // by its health checks
}

// proxyOf returns the states of a pool's static upstreams by address, as the
// configuration that answers for the pool has them.
func proxyOf(p *pool.Pool) map[string]proxyState {
	said := make(map[string]proxyState)
	if x := explainerOf(p); x != nil {
		for _, up := range x.Dispatcher.Proxy.Upstreams {
			said[up.Dial] = proxyState{pool.Available(up), up.Host == nil || up.Healthy()}
		}
	}
	return said
}

// viewWorker returns the view of a worker, without its last minutes and without a comparison.
func viewWorker(p *pool.Pool, w *worker.Worker, t time.Time, proxy map[string]proxyState) workerView {
	set, load, ranks := p.Settings.Load(), p.Load(t, w), viewRanks(p, t, w)
	asked, configured := w.Drains()
	running, limit := w.Running()
	health := w.Health.State(t)
	v := workerView{
		ID: w.ID, Dial: w.Dial, Anomalies: []string{}, Static: set.Upstreams[w.Dial], Role: w.Engine().Role(), Taints: w.Tainted(),
		Draining: w.Draining(), DrainAsked: asked, DrainConfigured: configured,
		Drained: w.Draining() && load.Requests == 0,
		Engine:  viewEngine(p, w), Health: viewHealth(w, &health, &load, t, proxy),
		Load: loadView{
			Booked: load.Booked, Running: running, MaxRunning: limit, LimitSource: limitSource(set.Worker(w.Dial), limit),
		},
		Cache: cacheView{Capacity: capacityOf(p, w, &load)}, Prefill: load.PrefillSpeed,
		Ranks: ranks, KVEvents: viewEvents(w, t),
	}
	note := stateOf(w, &health, proxy, load.Requests == 0, t)
	if v.State = note.What; note.Effect != "" {
		v.Look = append(v.Look, note)
	}
	if len(ranks) == 1 {
		v.Latency = &ranks[0].Accuracy
	}
	v.Models.Configured, v.Models.Listed = w.ModelsOf()
	cached := load.CachedTokens
	if len(v.KVEvents) > 0 {
		cached = 0
		for i := range v.KVEvents {
			e := &v.KVEvents[i]
			cached += e.Held[cache.Device.String()] * int64(e.BlockTokens)
		}
	}
	if load.CapacityTokens > 0 {
		blocks := load.PromptBlocks + float64(load.OutputBlocks)
		v.Cache.Used = round(blocks * float64(set.BlockSize) / float64(load.CapacityTokens))
		v.Cache.Cached = round(float64(cached) / float64(load.CapacityTokens))
	}
	for i := range ranks {
		if ranks[i].Timings >= fewSamples {
			v.slowness = max(v.slowness, ranks[i].Slowness)
		}
		if e := ranks[i].EngineLoad; e != nil {
			if v.Load.Waiting == nil {
				v.Load.Waiting = new(int64)
			}
			*v.Load.Waiting += int64(e.Waiting)
		}
	}
	return v
}

func (m *modelsView) names() []string {
	if m.Configured != nil {
		return m.Configured
	}
	return m.Listed
}

func viewHealth(w *worker.Worker, s *worker.HealthState, load *kvscore.Load, t time.Time, proxy map[string]proxyState) healthView {
	v := healthView{
		Available: isAvailable(w, s, proxy), Hung: w.IsHung(), LetBack: max(0, s.Window), HealthState: *s,
		ErrorRatio: load.Errors, ErrorsApart: load.ErrorsApart(),
	}
	if state, said := proxy[w.Dial]; said {
		v.Proxy = &state.available
	}
	if s.Reach != worker.ReachUnknown {
		v.Refusing = &s.Away
	}
	if !s.Until.IsZero() {
		v.MarkedDownSeconds = s.Until.Sub(t).Seconds()
	}
	return v
}

// isAvailable returns whether a worker gets new requests as others do. A worker that
// gets only a few requests after its mark does not. It is nil if no connection to it
// was tried yet.
func isAvailable(w *worker.Worker, s *worker.HealthState, proxy map[string]proxyState) *bool {
	state, said := proxy[w.Dial]
	yes := (state.healthy || !said) && !w.Draining() && !w.IsHung() && s.Well && !s.Away
	if yes && s.Reach == worker.ReachUnknown {
		return nil
	}
	return &yes
}

// The sources of what is known of an engine.
const (
	fromConfig  = "configured"
	fromEngine  = "found"
	fromNowhere = "unknown"
)

type engineView struct {
	Type           string            `json:"type,omitzero"`
	Source         string            `json:"source"`
	Version        string            `json:"version,omitzero"`
	Info           engine.Info       `json:"info"`
	Contradictions []string          `json:"contradictions"`
	Warnings       []observe.Warning `json:"warnings"`
}

func viewEngine(p *pool.Pool, w *worker.Worker) engineView {
	e := w.Engine()
	info := e.Info
	info.Started = info.Started.UTC()
	v := engineView{
		Type: e.Type, Source: fromConfig, Version: info.Version, Info: info,
		Contradictions: slices.Sorted(maps.Values(discovery.Contradictions(p, w))), Warnings: discovery.Warnings(w, time.Now()),
	}
	if v.Contradictions == nil && info.Type != "" {
		v.Contradictions = []string{}
	}
	switch {
	case w.Settings().Engine != worker.EngineAuto:
	case v.Type != "":
		v.Source = fromEngine
	default:
		v.Source = fromNowhere
	}
	return v
}

func limitSource(set worker.Settings, limit int64) string {
	switch {
	case set.MaxRunning == 0:
		return "default"
	case set.MaxRunning != worker.LimitAuto:
		return fromConfig
	case limit > 0:
		return fromEngine
	}
	return fromNowhere
}

type rankView struct {
	Rank int `json:"dp_rank"`
	kvscore.Load
	EngineLoad *engineLoadView `json:"engine_load,omitzero"`
}

type engineLoadView struct {
	kvscore.EngineLoad
	WaitingTokens *int64  `json:"waiting_tokens,omitzero"`
	External      int     `json:"other_clients_requests"`
	Age           float64 `json:"age_seconds"`
}

func viewEngineLoad(t time.Time, l *kvscore.Load) *engineLoadView {
	if l.EngineAt.IsZero() {
		return nil
	}
	v := &engineLoadView{EngineLoad: l.Engine, External: l.External, Age: max(0, t.Sub(l.EngineAt).Seconds())} // a report may be newer than t
	if l.Engine.WaitingTokens >= 0 {
		v.WaitingTokens = &l.Engine.WaitingTokens
	}
	return v
}

func viewRanks(p *pool.Pool, t time.Time, w *worker.Worker) []rankView {
	list := make([]rankView, 0, w.Ranks())
	for rank := range w.Ranks() {
		l, _ := p.Scheduler.Load(t, w.Target(rank))
		v := rankView{Rank: rank, Load: l, EngineLoad: viewEngineLoad(t, &l)}
		v.Capacity = capacityOf(p, w, &l)
		list = append(list, v)
	}
	return list
}

// capacityOf leaves out the reported capacity if neither the configuration nor the engine says it.
func capacityOf(p *pool.Pool, w *worker.Worker, l *kvscore.Load) kvscore.Capacity {
	c := l.Capacity
	if w.Settings().KVTokens == 0 && w.Engine().Info.KVTokens == 0 {
		c.ReportedTokens = 0
	}
	return c
}
