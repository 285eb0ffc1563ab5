package admin

import (
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
)

// Collector reads the pools when metrics are scraped.
type Collector struct{}

var (
	descLeases     = poolDesc("leases", "Attempts under way.")
	descWaiting    = poolDesc("waiting_requests", "Requests in the queue.")
	descBackground = poolDesc("waiting_background_requests", "Of waiting_requests, those of background classes.")
	descQueued     = poolDesc("queued_class_requests", "Requests in the queue by class.", "class", "held")
	descByTenant   = poolDesc("queued_tenant_requests", "Requests in the queue by class and tenant, of the ten tenants with the most.", "class", "tenant")
	descSaturated  = poolDesc("saturation",
		"How busy the workers of a role are that serve a model, from 0 to 1. 1 while requests wait that are not background. Without a model: all of them.", "role", "model")
	descExpected = poolDesc("predicted_ttft_ratio",
		"Mean predicted time to the first token of recent requests, in relation to the target of their class.", "class")
	descExpired   = poolDesc("leases_expired_total", "Leases that leaked and that the router ended.")
	descUntracked = poolDesc("untracked_prompts_total",
		"Prompts that had no room in the cache model, in whole or in part.")
	descFaults = poolDesc("policy_faults_total",
		"Choices in which the policy returned an invalid worker or changed the list of candidates. The router "+
			"took the least loaded worker.")
	descSessions = poolDesc("sessions", "Sessions bound to a worker.")
	descWaiters  = poolDesc("sessions_waiting", "Requests that wait for a concurrent first request of their session.")
	descEnds     = poolDesc("session_ends_total",
		"Bindings of sessions that the router ended: their time to live was over, or it needed room.", "reason")
	descIndex    = poolDesc("index_bytes", "Size of the index.")
	descPrefills = poolDesc("prefill_cost_seconds",
		"Learned prefill time over all workers: for each step, 1000 tokens, a million token pairs in "+
			"attention, or 1000 context tokens of active requests.", "per")
	descIncidents = poolDesc("incidents", "1 for each condition that lasts.", "condition")

	descJournalBytes  = poolDesc("journal_bytes", "Size of the journal on disk.")
	descJournalErrors = poolDesc("journal_errors_total", "Writes of the journal that failed.")
	descJournalLost   = poolDesc("journal_lost_records_total", "Records for which there was no room in memory.")
	descRestored      = poolDesc("journal_restored",
		"What the router restored at its start: sessions, responses, or tokens in cache models.", "what")

	descShared     = poolDesc("share_connected", "1 while the router shares what it does with others, 0 while their server fails.")
	descShareLost  = poolDesc("share_lost_records_total", "Records for other routers for which there was no room in memory.")
	descShareError = poolDesc("share_errors_total", "Failed calls of the server that routers share.")
	descShareLate  = poolDesc("share_late_seconds", "Time until the router read back what it told the others last.")
	descShareBytes = poolDesc("share_sent_bytes_total", "Bytes that the router sent to the others.")
	descPeers      = poolDesc("share_routers", "Other routers, by state: live, silent or refused.", "state")

	descTenants   = poolDesc("limited_tenants", "Tenants that have used some of their limits.")
	descForgotten = poolDesc("limits_forgotten_tenants_total", "Tenants whose use was forgotten, because there were too many.")
	descLimited   = poolDesc("limits_refused_total", "Requests that the limits of their tenants refused, by what the limit counts.", "limit")

	descErrorRatio = workerDesc("worker_error_ratio", "Share of errors and empty answers in about the last 20, without clients' mistakes.")
	descApart      = workerDesc("worker_errors_apart",
		"1 while the worker has far more errors and empty answers than the others for the same model.")
	descHung = workerDesc("workers_hung",
		"1 while the worker is hung: it has requests and produces no output, while others make progress.")
	descAvailable = workerDesc("worker_available",
		"1 if the worker gets new requests as others do. 0 if it is marked down, hung, asleep, draining, gets only a "+
			"few trial requests, refuses connections, or fails Caddy's health checks.")
	descEngine = workerDesc("worker_engine_info",
		"1, with the worker's engine and version as labels, as configured or found.", "engine", "version", "source")
	descRole     = workerDesc("worker_role", "1, with the worker's role as a label: both, prefill, decode or backup.", "role")
	descWarnings = workerDesc("worker_engine_warnings", "Warnings about the worker's engine that last.")
	descContrary = workerDesc("worker_contradictions", "Settings of the worker that its engine contradicts.")

	descRequests = rankDesc("worker_requests", "Requests under way on the worker's rank.")
	descRemote   = rankDesc("worker_other_routers_requests", "Of worker_requests, those of other routers.")
	descReported = rankDesc("worker_engine_requests",
		"Requests that the engine reports of the worker's rank: running or waiting. Absent if it has not "+
			"reported them lately.", "state")
	descPrefill  = rankDesc("worker_prefill_tokens", "Prompt tokens that the worker's rank has got and not computed yet.")
	descBlocks   = rankDesc("worker_blocks", "KV blocks of the active requests of the worker's rank.")
	descCached   = rankDesc("worker_cached_tokens", "Tokens in the cache model of the worker's rank.")
	descCapacity = rankDesc("worker_capacity_tokens",
		"Capacity that the router assumes for the KV cache of the worker's rank, in tokens: configured, "+
			"reported, or learned from reported cached tokens.")
	descSlowness = rankDesc("worker_slowness",
		"How many times longer a prefill takes on the worker's rank than the pool predicts.")
	descError = rankDesc("worker_ttft_error_ratio",
		"Median and 90th percentile of the error of the last 64 predicted times to first token: |observed / "+
			"predicted - 1|.", "quantile")
)

// descs are all of them, but for descBuild.
var descs []*prometheus.Desc

var descBuild = prometheus.NewDesc("caddy_kv_router_build_info", "1, with the version of the router as a label.", []string{"version"}, nil)

func poolDesc(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc("caddy_kv_router_"+name, help, append([]string{"pool"}, labels...), nil)
	descs = append(descs, d)
	return d
}

func workerDesc(name, help string, labels ...string) *prometheus.Desc {
	return poolDesc(name, help, append([]string{"worker"}, labels...)...)
}

func rankDesc(name, help string, labels ...string) *prometheus.Desc {
	return workerDesc(name, help, append([]string{"dp_rank"}, labels...)...)
}

// Describe implements prometheus.Collector.
func (Collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- descBuild
	for _, d := range descs {
		ch <- d
	}
}

// sink receives the figures of a pool, or of a part of it with labels of its own.
type sink struct {
	ch     chan<- prometheus.Metric
	labels []string
}

func (s sink) with(labels ...string) sink {
	return sink{s.ch, append(slices.Clip(s.labels), labels...)}
}

func (s sink) gauge(d *prometheus.Desc, v float64, labels ...string) {
	s.emit(d, prometheus.GaugeValue, v, labels...)
}

// emit omits a figure with invalid labels, so that the others still appear.
func (s sink) emit(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
	if m, err := prometheus.NewConstMetric(d, kind, v, s.with(labels...).labels...); err == nil {
		s.ch <- m
	}
}

// Collect implements prometheus.Collector.
func (Collector) Collect(ch chan<- prometheus.Metric) {
	t := time.Now()
	sink{ch: ch}.gauge(descBuild, 1, observe.Version())
	for _, p := range sortedPools() {
		to := sink{ch, []string{p.Name}}
		collectPool(to, p, t)
		set, proxy := p.Settings.Load(), proxyOf(p)
		for _, w := range p.All() {
			if p.IsUpstream(set, w) {
				collectWorker(to.with(w.Dial), p, w, t, proxy)
			}
			for rank := range w.Ranks() {
				load, known := p.Scheduler.Load(t, w.Target(rank))
				collectRank(to.with(w.Dial, strconv.Itoa(rank)), &load, known)
			}
		}
	}
}

func collectPool(to sink, p *pool.Pool, t time.Time) {
	s := p.Scheduler.Stats()
	to.gauge(descLeases, float64(s.Leases))
	collectQueue(to, p, t)
	for of, v := range p.Saturations(t) {
		to.gauge(descSaturated, v, string(of.Role), of.Model)
	}
	to.emit(descExpired, prometheus.CounterValue, float64(s.Expired))
	to.emit(descUntracked, prometheus.CounterValue, float64(s.Untracked))
	to.emit(descFaults, prometheus.CounterValue, float64(s.PolicyFaults))
	to.gauge(descSessions, float64(p.Sessions.Len()))
	to.gauge(descWaiters, float64(p.Sessions.Waiting()))
	for _, why := range []affinity.Reason{affinity.Expired, affinity.Evicted} {
		to.emit(descEnds, prometheus.CounterValue, float64(p.Sessions.Ended(why)), why.String())
	}
	to.gauge(descIndex, float64(s.IndexBytes))
	to.gauge(descExact, float64(s.ExactBytes))
	collectTexts(to, &s.Size)
	for _, in := range p.Incidents.Open(t) { // their names are a fixed few
		to.gauge(descIncidents, 1, in.What)
	}
	collectJournal(to, p.JournalState())
	collectLimits(to, p.Quota.Standing(t, 0))
	if s, on := p.ShareState(); on {
		collectShare(to, &s)
	}
	if s.Timings == 0 {
		return // the coefficients are assumptions
	}
	v := viewLatency(&s)
	to.gauge(descPrefills, v.Fixed/1e3, "step")
	to.gauge(descPrefills, v.Tokens/1e3, "1000_tokens")
	to.gauge(descPrefills, v.Attention/1e3, "million_token_pairs")
	to.gauge(descPrefills, v.Context/1e3, "1000_context_tokens")
}

func collectQueue(to sink, p *pool.Pool, t time.Time) {
	to.gauge(descWaiting, float64(p.Waiting()))
	to.gauge(descBackground, float64(p.WaitingInBackground()))
	classes, tenants := p.Queued(t)
	byClass, byTenant := make(map[string]pool.Queued), make(map[[2]string]int)
	for class, v := range p.Promises.Expected(t) {
		to.gauge(descExpected, v, class)
		byClass[class] = pool.Queued{} // so that a 0 is visible
	}
	for _, q := range classes {
		byClass[q.Class] = q
	}
	for class, q := range byClass {
		to.gauge(descQueued, float64(q.Requests-q.Held), class, "false")
		to.gauge(descQueued, float64(q.Held), class, "true")
	}
	for _, q := range tenants {
		byTenant[[2]string{q.Class, dispatch.TenantLabels.Label(q.Tenant)}] += q.Requests
	}
	for of, n := range byTenant {
		to.gauge(descByTenant, float64(n), of[0], of[1])
	}
}

func collectJournal(to sink, s pool.JournalState) {
	if !s.On {
		return
	}
	to.emit(descJournalErrors, prometheus.CounterValue, float64(s.Errors))
	to.emit(descJournalLost, prometheus.CounterValue, float64(s.Lost))
	to.gauge(descJournalBytes, float64(s.Bytes))
	to.gauge(descRestored, float64(s.Restored.Sessions), "sessions")
	to.gauge(descRestored, float64(s.Restored.Responses), "responses")
	to.gauge(descRestored, float64(s.Restored.CachedTokens), "cached_tokens")
}

func collectLimits(to sink, s *quota.Standing) {
	if s == nil {
		return
	}
	to.gauge(descTenants, float64(s.Tenants))
	to.emit(descForgotten, prometheus.CounterValue, float64(s.Forgotten))
	for what, n := range s.Refused {
		to.emit(descLimited, prometheus.CounterValue, float64(n), what)
	}
}

func collectShare(to sink, s *journal.ShareStatus) {
	to.gauge(descShared, asNumber(s.Connected))
	to.emit(descShareLost, prometheus.CounterValue, float64(s.Lost))
	to.emit(descShareError, prometheus.CounterValue, float64(s.Errors))
	to.emit(descShareBytes, prometheus.CounterValue, float64(s.Bytes))
	to.gauge(descShareLate, s.Late/1e3)
	states := make(map[string]float64)
	for i := range s.Peers {
		states[s.Peers[i].State()]++
	}
	for _, state := range journal.PeerStates {
		to.gauge(descPeers, states[state], state)
	}
}

func collectWorker(to sink, p *pool.Pool, w *worker.Worker, t time.Time, proxy map[string]proxyState) {
	health := w.Health.State(t)
	if yes := isAvailable(w, &health, proxy); yes != nil {
		to.gauge(descAvailable, asNumber(*yes))
	}
	e := viewEngine(p, w)
	to.gauge(descEngine, 1, w.Engine().Type, w.Engine().Info.Version, e.Source)
	to.gauge(descRole, 1, string(w.Engine().Role()))
	if e.Contradictions != nil {
		to.gauge(descContrary, float64(len(e.Contradictions)))
	}
	to.gauge(descWarnings, float64(len(e.Warnings)))
	to.gauge(descHung, asNumber(w.IsHung()))
	load := p.Load(t, w)
	to.gauge(descErrorRatio, load.Errors)
	to.gauge(descApart, asNumber(load.ErrorsApart()))
	collectEvents(to, w, t)
}

func collectRank(to sink, l *kvscore.Load, known bool) {
	to.gauge(descRequests, float64(l.Requests))
	to.gauge(descRemote, float64(l.Remote))
	to.gauge(descPrefill, float64(l.PrefillTokens))
	to.gauge(descBlocks, l.PromptBlocks+float64(l.OutputBlocks))
	to.gauge(descCached, float64(l.CachedTokens))
	if !known {
		return
	}
	to.gauge(descCapacity, float64(l.CapacityTokens))
	if !l.EngineAt.IsZero() {
		to.gauge(descReported, float64(l.Engine.Running), "running")
		to.gauge(descReported, float64(l.Engine.Waiting), "waiting")
	}
	if l.Timings > 0 {
		to.gauge(descSlowness, l.Slowness)
	}
	if l.Predictions > 0 {
		to.gauge(descError, l.ErrorMedian, "0.5")
		to.gauge(descError, l.ErrorP90, "0.9")
	}
}

func asNumber(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
