package admin

import (
	"cmp"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// poolView is a pool, as the admin API shows it. What is not known is null.
type poolView struct {
	Name            string         `json:"name"`
	Workers         int            `json:"workers"`
	DrainingWorkers int            `json:"draining_workers"`
	Leases          int            `json:"leases"`
	Waiting         int            `json:"waiting_requests"`
	Sessions        int            `json:"sessions"`
	SessionBytes    int64          `json:"session_bytes"`
	Responses       int            `json:"responses"`
	IndexBytes      int64          `json:"index_bytes"`
	ExactBytes      int64          `json:"exact_index_bytes"`
	IndexBlocks     int64          `json:"index_blocks"`
	BodyBytes       int64          `json:"request_body_bytes"`
	Speculative     int            `json:"speculative_prefills"`
	PrefillRate     *float64       `json:"prefill_tokens_per_second"`
	Latency         latencyView    `json:"latency"`
	Settings        settingsView   `json:"settings"`
	Totals          totalsView     `json:"totals"`
	Incidents       []incidentView `json:"incidents"`
	Snapshots       *snapshotsView `json:"snapshots"`
}

// snapshotsView is what became of a pool's snapshots. Saved and Bytes are null if the router
// has written none.
type snapshotsView struct {
	Saved    *float64 `json:"saved_seconds_ago"`
	Bytes    *int64   `json:"bytes"`
	Errors   uint64   `json:"errors"`
	Restored struct {
		Sessions     int   `json:"sessions"`
		Expired      int   `json:"expired_sessions"`
		Responses    int   `json:"responses"`
		CachedTokens int64 `json:"cached_tokens"`
	} `json:"restored"`
}

// viewSnapshots returns nil if snapshots are off.
func viewSnapshots(s pool.SnapshotState, t time.Time) *snapshotsView {
	if !s.On {
		return nil
	}
	v := &snapshotsView{Errors: s.Errors}
	if !s.Saved.IsZero() {
		ago := t.Sub(s.Saved).Seconds()
		v.Saved, v.Bytes = &ago, &s.Bytes
	}
	r := &s.Restored
	v.Restored.Sessions, v.Restored.Expired, v.Restored.Responses, v.Restored.CachedTokens = r.Sessions, r.Expired, r.Responses, r.CachedTokens
	return v
}

type settingsView struct {
	IndexMemory int64   `json:"index_memory_bytes"`
	BlockSize   int     `json:"block_size_tokens"`
	BlockSource string  `json:"block_size_from"`
	TextBlock   int     `json:"text_block_bytes"`
	TTL         float64 `json:"session_ttl_seconds"`
	MaxSessions int     `json:"max_sessions"`
	MaxWaiting  int     `json:"queue_max_waiting_requests"`
	MaxWait     float64 `json:"queue_max_wait_seconds"`
}

type totalsView struct {
	ExpiredLeases uint64 `json:"expired_leases"`
	Untracked     uint64 `json:"untracked_prompts"`
	PolicyFaults  uint64 `json:"policy_faults"`
}

// incidentView is a condition that lasts.
type incidentView struct {
	What  string  `json:"what"`
	Begun float64 `json:"begun_seconds_ago"`
	Last  float64 `json:"last_met_seconds_ago"`
	Times int     `json:"times"`
}

func viewPool(p *pool.Pool, t time.Time) poolView {
	s, set := p.Scheduler.Stats(), p.Settings.Load()
	v := poolView{
		Name: p.Name, Leases: s.Leases, Waiting: p.Waiting(), Sessions: p.Sessions.Len(), SessionBytes: p.Sessions.Bytes(), Responses: p.Responses.Count(),
		IndexBytes: s.IndexBytes, ExactBytes: s.ExactBytes, IndexBlocks: s.IndexBlocks, BodyBytes: p.Memory.Held.Load(), Speculative: p.Background.Running(),
		Settings: settingsView{set.Memory, set.BlockSize, blockSource(p, set), set.TextBlock, time.Duration(set.TTL).Seconds(), set.MaxSessions, set.MaxWaiting, time.Duration(set.MaxWait).Seconds()},
		Latency:  viewLatency(&s), PrefillRate: known(s.PrefillRate),
		Totals:    totalsView{s.Expired, s.Untracked, s.PolicyFaults},
		Incidents: viewIncidents(&p.Incidents, t),
		Snapshots: viewSnapshots(p.Snapshots(), t),
	}
	for _, w := range p.All() {
		v.Workers++
		if w.Draining() {
			v.DrainingWorkers++
		}
	}
	return v
}

// viewIncidents returns the conditions that last, the oldest first.
func viewIncidents(i *pool.Incidents, t time.Time) []incidentView {
	open := i.Open()
	list := make([]incidentView, 0, len(open))
	for what, in := range open {
		list = append(list, incidentView{what, t.Sub(in.Begun).Seconds(), t.Sub(in.Last).Seconds(), in.Times})
	}
	slices.SortFunc(list, func(a, b incidentView) int { return cmp.Compare(b.Begun, a.Begun) })
	return list
}

type workerView struct {
	ID   uint64 `json:"id"`
	Dial string `json:"dial"`
	// Static is whether it is an upstream by the configuration; others come
	// from a dynamic source, or are not forgotten yet.
	Static          bool `json:"static_upstream"`
	Draining        bool `json:"draining"`
	DrainAsked      bool `json:"drain_by_admin_api"`
	DrainConfigured bool `json:"drain_by_config"`
	// Drained is whether it is draining, and nothing runs on any of its ranks.
	Drained bool       `json:"drained"`
	Engine  engineView `json:"engine"`
	Models  modelsView `json:"models"`
	Taints  []string   `json:"taints"`
	Health  healthView `json:"health"`
	// Load, Cache and Prefill are sums over Ranks.
	Load    loadView  `json:"load"`
	Cache   cacheView `json:"cache"`
	Prefill rateView  `json:"prefill"`
	// Latency is null where there are several Ranks, which have their own.
	Latency *speedView `json:"latency"`
	Ranks   []rankView `json:"dp_ranks"`
	Hits    hitsView   `json:"hits"`
	// KVEvents are those that the router follows, one entry for each publisher.
	KVEvents []eventsView `json:"kv_events"`
}

type modelsView struct {
	Configured []string `json:"configured"`
	Listed     []string `json:"listed"`
}

type healthView struct {
	// Available is the metric worker_available.
	Available *bool `json:"available"`
	// Proxy is what Caddy's health checks say, and max_requests.
	Proxy *bool `json:"proxy_available"`
	// Refusing is whether the last connection to it could not be made, or it does
	// not answer the router's questions.
	Refusing *bool `json:"refuses_connections"`
	// Hung is whether nothing comes from it while others make progress.
	Hung              bool       `json:"hung"`
	MarkedDownUntil   *time.Time `json:"marked_down_until"`
	MarkedDownSeconds float64    `json:"marked_down_seconds"`
	LetBack           *int       `json:"let_back_requests"`
	Failures          int        `json:"failures_in_a_row"`
	Answers           float64    `json:"recent_answers"`
	Errors            float64    `json:"recent_errors"`
}

type loadView struct {
	rankLoad
	// Running are inferences; MaxRunning is null where there is no limit.
	Running    int64  `json:"running_requests"`
	MaxRunning *int64 `json:"max_running_requests"`
	// LimitSource is where MaxRunning comes from. It is unknown while the option is auto
	// and the engine reports no limit.
	LimitSource string `json:"max_running_from"`
}

type cacheView struct {
	cacheSize
	// IndexShare is its part of what all workers of the pool hold.
	IndexShare *float64 `json:"index_share"`
}

type rateView struct {
	Rate    float64 `json:"tokens_per_second"`
	Learned bool    `json:"learned"`
}

// hitsView has sums since the worker became known.
type hitsView struct {
	Estimated int64    `json:"estimated_prompt_tokens"`
	Predicted int64    `json:"predicted_cached_tokens"`
	PredRatio *float64 `json:"predicted_hit_ratio"`
	Prompt    int64    `json:"reported_prompt_tokens"`
	Cached    int64    `json:"reported_cached_tokens"`
	RepRatio  *float64 `json:"reported_hit_ratio"`
}

// viewWorkers returns the views of those of the pool's workers that are wanted.
func viewWorkers(p *pool.Pool, t time.Time, wanted func(*pool.Worker) bool) []workerView {
	all := p.All()
	slices.SortFunc(all, func(a, b *pool.Worker) int { return cmp.Compare(a.Dial, b.Dial) })
	proxy, set := proxyOf(p), p.Settings.Load()
	loads, sum := make([]kvscore.Load, len(all)), int64(0)
	for i, w := range all {
		loads[i] = p.Load(t, w)
		sum += loads[i].CachedTokens
	}
	list := make([]workerView, 0, len(all))
	for i, w := range all {
		if !wanted(w) {
			continue
		}
		v := viewWorker(w, t, &loads[i], proxy, set.Worker(w.Dial))
		v.Engine, v.Ranks, v.KVEvents = viewEngine(p, w), viewRanks(p, t, w), viewEvents(w, t)
		if len(v.Ranks) == 1 {
			v.Latency = v.Ranks[0].Latency
		}
		v.Cache.cacheSize = viewCache(p, w, &loads[i])
		v.Static = set.Upstreams[w.Dial]
		v.Cache.IndexShare = ratio(v.Cache.Cached, sum)
		list = append(list, v)
	}
	return list
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
		for _, up := range x.Static {
			said[up.Dial] = proxyState{pool.Available(up), up.Host == nil || up.Healthy()}
		}
	}
	return said
}

func viewWorker(w *pool.Worker, t time.Time, load *kvscore.Load, proxy map[string]proxyState, set pool.WorkerSettings) workerView {
	hits := &discovery.Of(w).Hits
	health := w.Health.State(t)
	asked, configured := w.Drains()
	v := workerView{
		ID: w.ID, Dial: w.Dial, Taints: w.Tainted(),
		Draining: asked || configured, DrainAsked: asked, DrainConfigured: configured,
		Drained: (asked || configured) && load.Requests == 0,
		Health: healthView{
			Available: isAvailable(w, &health, proxy), Hung: w.IsHung(),
			LetBack: known(max(0, health.Window)), Failures: health.Fails, Answers: health.Answers, Errors: health.Errors,
		},
		Load:    viewWorkerLoad(w, load, set),
		Prefill: rateView{load.PrefillRate, load.Timings > 0},
		Hits: hitsView{
			Estimated: hits.Estimated.Load(), Predicted: hits.Foreseen.Load(),
			Prompt: hits.Prompt.Load(), Cached: hits.Cached.Load(),
		},
	}
	if state, said := proxy[w.Dial]; said {
		v.Health.Proxy = &state.available
	}
	v.Hits.PredRatio, v.Hits.RepRatio = ratio(v.Hits.Predicted, v.Hits.Estimated), ratio(v.Hits.Cached, v.Hits.Prompt)
	if health.Reach != pool.ReachUnknown {
		v.Health.Refusing = &health.Away
	}
	if !health.Until.IsZero() {
		until := health.Until.UTC()
		v.Health.MarkedDownUntil, v.Health.MarkedDownSeconds = &until, until.Sub(t).Seconds()
	}
	v.Models.Configured, v.Models.Listed = w.ModelsOf()
	return v
}

func viewWorkerLoad(w *pool.Worker, load *kvscore.Load, set pool.WorkerSettings) loadView {
	running, limit := w.Running()
	return loadView{viewLoad(load), running, known(limit), limitSource(set, limit)}
}

// isAvailable returns whether a worker gets new requests as others do. A worker that
// gets only a few requests after its mark does not. It is nil if no connection to it
// was tried yet.
func isAvailable(w *pool.Worker, s *pool.HealthState, proxy map[string]proxyState) *bool {
	state, said := proxy[w.Dial]
	yes := (state.healthy || !said) && !w.Draining() && !w.IsHung() && s.Well && !s.Away
	if yes && s.Reach == pool.ReachUnknown {
		return nil
	}
	return &yes
}

// ratio returns part/whole, nil if whole is 0.
func ratio(part, whole int64) *float64 {
	if whole == 0 {
		return nil
	}
	f := float64(part) / float64(whole)
	return &f
}

// sessionView is a session without its key, which is a secret to somebody.
type sessionView struct {
	KeyHash string  `json:"key_hash"`
	Bound   bool    `json:"bound"`
	Worker  uint64  `json:"worker,omitempty"`
	Dial    string  `json:"dial,omitempty"`
	Rank    uint32  `json:"dp_rank"`
	Kind    string  `json:"kind,omitempty"`
	TTL     float64 `json:"ttl_seconds,omitempty"`
	Expires float64 `json:"expires_in_seconds,omitempty"`
}

// dials returns the addresses of a pool's workers by target.
func dials(p *pool.Pool) map[kvscore.Target]string {
	list := make(map[kvscore.Target]string)
	for _, w := range p.All() {
		for rank := range w.Ranks() {
			list[w.Target(rank)] = w.Dial
		}
	}
	return list
}

func viewSession(key affinity.Key, b *affinity.Binding, dials map[kvscore.Target]string, t time.Time) sessionView {
	return sessionView{
		KeyHash: key.String(), Bound: true, Worker: b.Target.Worker, Dial: dials[b.Target], Rank: b.Target.Rank,
		Kind: b.Kind.String(), TTL: b.TTL.Seconds(), Expires: b.Expires.Sub(t).Seconds(),
	}
}
