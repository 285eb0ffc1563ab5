// Package handler is the Caddy directive kv_router: its configuration, provisioning,
// ServeHTTP and the policy modules. It holds no routing arithmetic, which is in package
// kvscore. The comments of [Handler] and of the policies, such as [PredictedLatency], tell
// operators what each option does.
package handler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/admin"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/speculative"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func init() {
	caddy.RegisterModule(new(Handler))
}

func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.kv_router",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision sets up the handler. It leaves the pool as it is, because Caddy may reject
// the configuration.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger, h.ctx, h.registry = ctx.Logger(), ctx, ctx.GetMetricsRegistry()
	if err := h.setDefaults(); err != nil {
		return err
	}
	for _, step := range []func(caddy.Context) error{
		h.loadPolicies, h.loadMatchers, h.openPool, h.provisionProxy, h.wireDispatcher,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	h.explainer.Join()
	h.logger.Info("kv_router is configured", zap.String("version", observe.Version()), zap.String("pool", h.Pool))
	go h.adoptWhenLive(ctx)
	return nil
}

func (h *Handler) openPool(caddy.Context) error {
	value, _, err := pool.Pools.LoadOrNew(h.Pool, func() (caddy.Destructor, error) {
		return pool.New(h.Pool, h.settings.WithDefaults(), turn.NewCloser)
	})
	if err != nil {
		return fmt.Errorf("opening pool %s: %w", h.Pool, err)
	}
	h.pool, h.holdsPool = value.(*pool.Pool), true
	if h.config, err = h.pool.Agree(h.registry, h.settings); err != nil {
		err = fmt.Errorf("pool %s: %w", h.Pool, err)
	}
	if file := journalFile(&h.settings.Journal, h.Pool); err == nil && file != "" {
		h.pool.Recall(file)
	}
	return err
}

const incidentDNS = "DNS fails, and the router uses the addresses that it gave last"

// provisionProxy sets the proxy's selection policy and transport before it provisions
// the proxy, because the proxy starts its health checks then.
func (h *Handler) provisionProxy(ctx caddy.Context) error {
	rp := h.ReverseProxy
	if rp.LoadBalancing == nil {
		rp.LoadBalancing = new(reverseproxy.LoadBalancing)
	}
	rp.LoadBalancing.SelectionPolicy = dispatch.Selector{}
	var err error
	if h.transport, err = upstream.Load(ctx, rp, dispatch.AttemptOf); err != nil {
		return err
	}
	h.client = upstream.NewClient(rp, h.transport, func(dial string) (key string, may bool) {
		set := h.pool.Settings.Load().Worker(dial)
		_, declared := h.backups[dial]
		return set.APIKey, !set.IsBackup() && !declared
	})
	if err := rp.Provision(ctx); err != nil {
		return fmt.Errorf("provisioning reverse_proxy: %w", err)
	}
	h.proxyReady = true
	h.forget = upstream.KeepNames(rp, func(err error) {
		h.pool.Raise(time.Now(), incidentDNS, err)
	})
	h.warn(proxyWarnings(rp, h.transport.HTTPTransport)...)
	return nil
}

// wireDispatcher makes the dispatcher, and what uses it, after everything that they need. The dispatcher
// makes the retries in place of the proxy, within the operator's limits.
func (h *Handler) wireDispatcher(caddy.Context) error {
	dispatch.Register(h.registry, h.logger, admin.Collector{})
	lb := h.ReverseProxy.LoadBalancing
	limits := dispatch.Limits{
		Duration: time.Duration(lb.TryDuration), Interval: time.Duration(lb.TryInterval), Retries: lb.Retries,
	}
	match := lb.RetryMatch
	lb.TryDuration, lb.TryInterval, lb.Retries, lb.RetryMatch = 0, 0, 0, nil
	h.prober = discovery.New(h.ctx, h.pool, h.ReverseProxy, h.client, h.logger)
	d := &dispatch.Dispatcher{
		Runner: attempt.Runner{
			Pool: h.pool, Transport: h.transport, Logger: h.logger,
			Labels: h.ResponseHeaders, ServerTiming: h.ServerTiming, CacheStatus: h.CacheStatus,
		},
		Proxy: h.ReverseProxy, Client: h.client, Prober: h.prober,
		Policy: h.policy, Shadow: dispatch.NewShadow(h.shadow, h.Pool),
		Sessions: &turn.Sessions{
			Pool: h.pool, Client: h.client, Hard: h.sessionMode() == affinityHard,
			// Only a policy whose costs are times knows the price of leaving a session's target.
			Soft: h.sessionMode() == affinitySoft && kvscore.CostUnit(h.policy) == kvscore.UnitMilliseconds,
		},
		Timeouts: valueOf(h.Timeouts), Resume: *h.Resume, Limits: limits, RetryMatch: match, Phases: h.phases,
		Backups: h.backups, KeepBody: len(h.ReverseProxy.HandleResponse) > 0,
		Series: dispatch.NewSeries(h.Pool),
	}
	d.Sessions.Failed = func() { d.FallBack(dispatch.FallbackUnbound) }
	d.FollowUps = speculative.NewRunner(h.ctx, h.pool, h.client, h.SpeculativePrefill).Answering
	h.dispatcher, h.reader = d, h.newReader()
	h.explainer = &admin.Explainer{Reader: h.reader, Dispatcher: d}
	return nil
}

func (h *Handler) newReader() *plan.Reader {
	p := h.pool
	tenant, _ := plan.PlaceholderName(h.Tenant)
	scope, _ := plan.PlaceholderName(cmp.Or(valueOf(h.Affinity).Scope, "{http.auth.user.id}"))
	rd := &plan.Reader{
		MaxBody: h.MaxBody, InjectsUsage: h.InjectUsage, Tenant: tenant,
		Sessions: plan.Sessions{
			Keys: h.keys, Scope: scope, HeldOnly: h.sessionMode() == affinityOff, Secret: p.Secret, Conversation: p.Responses.Session,
		},
		Direct: h.RequirePin, EnforcesSalt: h.EnforceCacheSalt,
		Grants: h.grants, Memory: &p.Memory, Ratios: &p.Ratios, Hashing: p.Hashing, Adapter: p.Adapter, Canonical: p.Canonical, OnlyModel: p.OnlyModel, TakesTokens: h.prober.TakesTokenData,
		Transfers: p.Transfers, Lists: p.Lists, Keeps: p.Responses.Keeps, Public: h.public, KeeperServes: p.KeeperServes,
		TTL:     func() time.Duration { return time.Duration(p.Settings.Load().TTL) },
		Waiting: func() uint64 { return uint64(p.Waiting()) },
	}
	if len(h.Classes) > 0 {
		rd.Class = h.classOf
	}
	if h.backups != nil {
		rd.Backups = h.backupsOf
	}
	return rd
}

// liveCheck is how often a provisioned configuration checks whether it serves.
const liveCheck = 20 * time.Millisecond

// adoptWhenLive adopts the pool once the configuration serves, not before: a
// configuration that is only validated, or is rejected, must change nothing. Caddy has
// no hook for that: it may reject a configuration after its event "started". The metrics
// registry identifies a configuration, for each has its own.
func (h *Handler) adoptWhenLive(ctx context.Context) {
	ticker := time.NewTicker(liveCheck)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if h.adopt(); h.adopted.Load() {
			return
		}
	}
}

// journalFile returns the file of a pool's journal, empty if it has none.
func journalFile(set *pool.Journal, name string) string {
	switch {
	case set.Enabled != nil && !*set.Enabled:
		return ""
	case set.File != "":
		return caddy.NewReplacer().ReplaceAll(set.File, "")
	}
	return pool.JournalFile(name)
}

// adopt has the pool use this handler's settings, once, if the configuration serves. A configuration
// may get requests before: Caddy opens its first listener, and may then reject it because of another one.
func (h *Handler) adopt() {
	if h.adopted.Load() {
		return
	}
	if active := caddy.ActiveContext(); active.GetMetricsRegistry() != h.registry {
		return
	}
	set := h.config.Get()
	h.adopting.Do(func() { // requests that come meanwhile wait, because these settings plan them
		if discovery.Apply(h.pool, set) {
			h.logger.Info("pool settings changed", zap.String("pool", h.Pool))
		}
		dispatch.KnowClasses(h.Pool, set.Targets, h.pool.Promises.Keep(set.Targets))
		h.pool.Tenants.Keep(&set.Limits)
	})
	if h.adopted.CompareAndSwap(false, true) {
		h.pool.KeepJournal(pool.Journal{File: journalFile(&set.Journal, h.Pool), MaxSize: set.Journal.MaxSize})
		h.pool.KeepShare(set.Share)
		h.pool.Serve(time.Now())
		h.explainer.Lead()
		h.prober.Start()
	}
}

// ready prepares the handler for a request: it may be the first, and come before adoptWhenLive.
func (h *Handler) ready(ctx context.Context) {
	h.adopt()
	h.noticeServer(ctx)
	h.prober.Start() // if adopt has not
	h.prober.Await(ctx)
}

// Cleanup lets go of the pool. Requests may still be under way.
func (h *Handler) Cleanup() error {
	var err error
	if h.proxyReady {
		// after a failed Provision it would take hosts off a running config
		h.proxyReady = false
		err = h.ReverseProxy.Cleanup()
		h.forget()
		h.transport.CloseIdle() // connections that become idle from now on are closed, too
	}
	if h.holdsPool {
		// the pointer stays: requests of this config may still be under way
		h.holdsPool = false
		if h.explainer != nil {
			h.explainer.Leave()
		}
		_, _ = pool.Pools.Delete(h.Pool)
	}
	return err
}

// ServeHTTP routes one request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	start := time.Now()
	h.ready(r.Context())
	p, err := h.reader.Read(r)
	if err != nil {
		return h.refuse(w, r, err)
	}
	defer p.Close()
	if p.Ext.QueryOnly() {
		return h.answerQuery(w, r, p)
	}
	reserved, err := h.reserve(w, p, start)
	if err != nil {
		p.GiveBack()
		return h.refuse(w, r, err)
	}
	var report *dispatch.Report
	defer func() { h.charge(reserved, report) }()
	d, err := h.dispatcher.Begin(p, start)
	if err != nil {
		p.GiveBack()
		return h.refuse(w, r, err)
	}
	d.OwnLimits = reserved != nil
	defer func() {
		report = d.End()
		h.report(r, report)
	}()
	if p.Request != nil && p.Request.Stream && h.Keepalive >= 0 {
		k := response.Keep(w, p.API, cmp.Or(time.Duration(h.Keepalive), 15*time.Second), h.earlyHeader(w, r), func() bool {
			return h.Keepalive > 0 || d.Seated() // by default, the queue's refusals keep their status
		})
		defer k.Close()
		w = k
	}
	err = h.ReverseProxy.ServeHTTP(w, d.Request(r), next)
	if err = answer(w, r, d.Settle(w, err)); err != nil {
		body.GiveBack(r, d.Body, p.Once)
	}
	return err
}

// report counts a request that has ended, and adds to its access log.
func (h *Handler) report(r *http.Request, report *dispatch.Report) {
	h.dispatcher.Count(report.Outcome)
	if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		user, _ := repl.GetString("http.auth.user.id")
		dispatch.CountUser(h.Pool, user, report)
	}
	if server := serverOf(r.Context()); server == nil || server.Logs == nil || !report.Logged() {
		return // nothing would show it
	}
	if extra, ok := r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
		extra.Set(zap.Object("kv_router", report))
	}
}

// answerQuery answers a request that only asks where it would go.
func (h *Handler) answerQuery(w http.ResponseWriter, r *http.Request, p *plan.Plan) error {
	h.dispatcher.CountDropped(p.Dropped, p.Malformed)
	err := h.explainer.AnswerQuery(w, p)
	if err != nil {
		p.GiveBack()
	}
	return h.refuse(w, r, err)
}

// refuse counts and answers a request that was not dispatched.
func (h *Handler) refuse(w http.ResponseWriter, r *http.Request, err error) error {
	if e, ok := errors.AsType[*api.Refusal](err); ok {
		outcome := dispatch.OutcomeRejected
		if e.Code == api.CodeUnreadable || e.Code == api.CodeTooLarge {
			outcome = dispatch.OutcomeUnreadable
		}
		report := dispatch.Refused(outcome, e)
		if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
			report.Class, _ = repl.GetString("http.kv_router.class")
			report.Tenant, _ = repl.GetString("http.kv_router.tenant")
		}
		h.report(r, report)
	}
	return answer(w, r, err)
}

var eventStream = http.Header{"Content-Type": {"text/event-stream; charset=utf-8"}}

// earlyHeader returns the header that the client of a stream gets if the engine's takes too long; nil if it
// waits for that.
func (h *Handler) earlyHeader(w http.ResponseWriter, r *http.Request) http.Header {
	if h.Keepalive == 0 && (hasErrorRoutes(r) || len(h.ReverseProxy.HandleResponse) > 0) {
		return nil // what the client gets may be theirs
	}
	early := eventStream
	if ops := h.ReverseProxy.Headers; ops != nil && ops.Response != nil && (ops.Response.Require == nil || ops.Response.Require.Match(http.StatusOK, early)) {
		early = early.Clone()
		repl, _ := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		ops.Response.ApplyTo(early, repl)
		maps.DeleteFunc(early, func(_ string, values []string) bool { // what only the answer knows
			return strings.Contains(strings.Join(values, ""), "{http.")
		})
	}
	const allow = "Access-Control-Allow-Origin"
	if r.Header.Get("Origin") != "" && early.Get(allow) == "" && w.Header().Get(allow) == "" {
		return nil // a browser needs the engine's
	}
	return early
}

func hasErrorRoutes(r *http.Request) bool {
	server := serverOf(r.Context())
	return server != nil && server.Errors != nil
}

// serverOf returns the server of a request by its context; nil if it has none.
func serverOf(ctx context.Context) *caddyhttp.Server {
	server, _ := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	return server
}

// retryLater is what clients are told to wait when there is no worker, in seconds:
// about as long as a worker is marked down.
const retryLater = "2"

// answer answers with a refusal in the shape that the API's clients expect. It returns
// other errors as they are, and a refusal as an error for the server's error routes if
// there are any.
func answer(w http.ResponseWriter, r *http.Request, err error) error {
	e, ok := errors.AsType[*api.Refusal](err)
	k, _ := w.(*response.Keepalive)
	switch late := err != nil && k.Late(); {
	case late && !ok:
		e = &api.Refusal{Status: http.StatusBadGateway, Code: api.CodeFailed, Err: errors.New("the answer could not be delivered")}
	case !ok:
		return err
	case !late && hasErrorRoutes(r):
		return caddyhttp.Error(e.Status, e.Err) // the error routes' answer may be another's
	}
	switch {
	case e.RetryAfter > 0:
		w.Header().Set("Retry-After", strconv.Itoa(e.RetryAfter))
	case e.Status == http.StatusServiceUnavailable:
		w.Header().Set("Retry-After", retryLater)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.Status)
	_, err = w.Write(e.Body()) //nolint:gosec // JSON, and said to be
	return err
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
