package admin

import (
	"cmp"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// poolView is a pool, as the admin API shows it. What is not known is absent.
type poolView struct {
	Name            string `json:"name"`
	Workers         int    `json:"workers"`
	DrainingWorkers int    `json:"draining_workers"`
	kvscore.Stats
	Waiting      int             `json:"waiting_requests"`
	Sessions     int             `json:"sessions"`
	SessionBytes int64           `json:"session_bytes"`
	Responses    int             `json:"responses"`
	BodyBytes    int64           `json:"request_body_bytes"`
	Speculative  int             `json:"speculative_prefills"`
	Latency      latencyView     `json:"latency"`
	Settings     settingsView    `json:"settings"`
	Incidents    []pool.Incident `json:"incidents"`
	Journal      *journalView    `json:"journal,omitzero"`
	Share        *shareView      `json:"share,omitzero"`
}

// shareView is how a pool shares what it does with other routers.
type shareView struct {
	journal.ShareStatus
	Peers []peerView `json:"routers"`
}

type peerView struct {
	journal.Peer
	State string  `json:"state"`
	Seen  float64 `json:"seen_seconds_ago"`
}

// viewShare returns nil if nothing is shared.
func viewShare(p *pool.Pool, t time.Time) *shareView {
	s, on := p.ShareState()
	if !on {
		return nil
	}
	v := &shareView{ShareStatus: s, Peers: make([]peerView, 0, len(s.Peers))}
	for _, one := range s.Peers {
		v.Peers = append(v.Peers, peerView{one, one.State(), t.Sub(one.Seen).Seconds()})
	}
	return v
}

// journalView is how a pool's journal fares. Written is absent if the router has written nothing.
type journalView struct {
	Written float64 `json:"written_seconds_ago,omitzero"`
	pool.JournalState
}

// viewJournal returns nil if there is no journal.
func viewJournal(s pool.JournalState, t time.Time) *journalView {
	if !s.On {
		return nil
	}
	v := &journalView{JournalState: s}
	if !s.Written.IsZero() {
		v.Written = t.Sub(s.Written).Seconds()
	}
	return v
}

type settingsView struct {
	IndexMemory int64   `json:"index_memory_bytes"`
	BodyMemory  int64   `json:"request_bodies_memory_bytes"`
	BlockSize   int     `json:"block_size_tokens"`
	BlockSource string  `json:"block_size_from"`
	TextBlock   int     `json:"text_block_bytes"`
	TTL         float64 `json:"session_ttl_seconds"`
	MaxSessions int     `json:"max_sessions"`
	MaxWaiting  int     `json:"queue_max_waiting_requests"`
	MaxWait     float64 `json:"queue_max_wait_seconds"`
}

func viewPool(p *pool.Pool, t time.Time) poolView {
	s, set := p.Scheduler.Stats(), p.Settings.Load()
	v := poolView{
		Name: p.Name, Stats: s, Waiting: p.Waiting(), Sessions: p.Sessions.Len(), SessionBytes: p.Sessions.Bytes(),
		Responses: p.Responses.Count(), BodyBytes: p.Memory.Held.Load(),
		Latency: viewLatency(&s), Incidents: p.Incidents.Open(t), Journal: viewJournal(p.JournalState(), t), Share: viewShare(p, t),
		Settings: settingsView{
			IndexMemory: set.Memory, BodyMemory: body.MaxBytes(), BlockSize: set.BlockSize, BlockSource: blockSource(p, set), TextBlock: set.TextBlock,
			TTL: time.Duration(set.TTL).Seconds(), MaxSessions: set.MaxSessions,
			MaxWaiting: set.MaxWaiting, MaxWait: time.Duration(set.MaxWait).Seconds(),
		},
	}
	for _, w := range p.All() {
		v.Workers++
		v.Speculative += w.Speculating()
		if w.Draining() {
			v.DrainingWorkers++
		}
	}
	return v
}

type workerView struct {
	ID   uint64 `json:"id"`
	Dial string `json:"dial"`
	// Static is whether it is an upstream by the configuration; others come
	// from a dynamic source, or are not forgotten yet.
	Static          bool        `json:"static_upstream"`
	Role            engine.Role `json:"role"`
	Draining        bool        `json:"draining"`
	DrainAsked      bool        `json:"drain_by_admin_api"`
	DrainConfigured bool        `json:"drain_by_config"`
	// Drained is whether it is draining, and nothing runs on any of its ranks.
	Drained bool       `json:"drained"`
	Engine  engineView `json:"engine"`
	Models  modelsView `json:"models"`
	Taints  []string   `json:"taints"`
	Health  healthView `json:"health"`
	// Load, Cache and Prefill are sums over Ranks.
	Load    loadView             `json:"load"`
	Cache   kvscore.Room         `json:"cache"`
	Prefill kvscore.PrefillSpeed `json:"prefill"`
	// Latency is absent where there are several Ranks, which have their own.
	Latency *kvscore.Accuracy `json:"latency,omitzero"`
	Ranks   []rankView        `json:"dp_ranks"`
	// Recent is what happened in the last five minutes.
	Recent recentView `json:"recent"`
	// KVEvents are those that the router follows, one entry for each publisher.
	KVEvents []eventsView `json:"kv_events"`
}

type modelsView struct {
	Configured []string `json:"configured"`
	Listed     []string `json:"listed"`
}

type healthView struct {
	// Available is the metric worker_available.
	Available *bool `json:"available,omitzero"`
	// Proxy is what Caddy's health checks say, and max_requests.
	Proxy *bool `json:"proxy_available,omitzero"`
	// Refusing is whether the last connection to it could not be made, or it does
	// not answer the router's questions.
	Refusing *bool `json:"refuses_connections,omitzero"`
	// Hung is whether nothing comes from it while others make progress.
	Hung              bool    `json:"hung"`
	MarkedDownSeconds float64 `json:"marked_down_seconds"`
	LetBack           int     `json:"let_back_requests,omitzero"`
	// ErrorRatio is the share of errors and empty answers in the last ones, those by
	// clients' mistakes too. ErrorsApart is whether it is far above that of the other workers.
	ErrorRatio  float64 `json:"error_ratio"`
	ErrorsApart bool    `json:"errors_apart"`
	pool.HealthState
}

type loadView struct {
	kvscore.Booked
	// Running are inferences; MaxRunning is absent where there is no limit.
	Running    int64 `json:"running_requests"`
	MaxRunning int64 `json:"max_running_requests,omitzero"`
	// LimitSource is where MaxRunning comes from. It is unknown while the option is auto
	// and the engine reports no limit.
	LimitSource string `json:"max_running_from"`
}

// viewWorkers returns the views of a pool's workers, by address.
func viewWorkers(p *pool.Pool) []workerView {
	t, all := time.Now(), p.All()
	slices.SortFunc(all, func(a, b *pool.Worker) int { return cmp.Compare(a.Dial, b.Dial) })
	proxy := proxyOf(p)
	list := make([]workerView, 0, len(all))
	for _, w := range all {
		list = append(list, viewWorker(p, w, t, proxy))
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
		for _, up := range x.Dispatcher.Proxy.Upstreams {
			said[up.Dial] = proxyState{pool.Available(up), up.Host == nil || up.Healthy()}
		}
	}
	return said
}

func viewWorker(p *pool.Pool, w *pool.Worker, t time.Time, proxy map[string]proxyState) workerView {
	set, load, ranks := p.Settings.Load(), p.Load(t, w), viewRanks(p, t, w)
	asked, configured := w.Drains()
	running, limit := w.Running()
	v := workerView{
		ID: w.ID, Dial: w.Dial, Static: set.Upstreams[w.Dial], Role: w.Engine().Role(), Taints: w.Tainted(),
		Draining: w.Draining(), DrainAsked: asked, DrainConfigured: configured,
		Drained: w.Draining() && load.Requests == 0,
		Engine:  viewEngine(p, w), Health: viewHealth(w, &load, t, proxy), Recent: viewRecent(recentOf(w, t)),
		Load: loadView{
			Booked: load.Booked, Running: running, MaxRunning: limit, LimitSource: limitSource(set.Worker(w.Dial), limit),
		},
		Cache: roomOf(p, w, &load), Prefill: load.PrefillSpeed,
		Ranks: ranks, KVEvents: viewEvents(w, t),
	}
	if len(ranks) == 1 {
		v.Latency = &ranks[0].Accuracy
	}
	v.Models.Configured, v.Models.Listed = w.ModelsOf()
	return v
}

func viewHealth(w *pool.Worker, load *kvscore.Load, t time.Time, proxy map[string]proxyState) healthView {
	s := w.Health.State(t)
	v := healthView{
		Available: isAvailable(w, &s, proxy), Hung: w.IsHung(), LetBack: max(0, s.Window), HealthState: s,
		ErrorRatio: load.Errors, ErrorsApart: load.ErrorsApart(),
	}
	if state, said := proxy[w.Dial]; said {
		v.Proxy = &state.available
	}
	if s.Reach != pool.ReachUnknown {
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
	return new(float64(part) / float64(whole))
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
