// Package handler is the Caddy side of kv_router: its configuration, the way
// of one request through it, and what the operator sees of that. It holds no
// routing arithmetic; that is package kvscore's. What an operator needs is in
// the documentation of [Handler] and of the policies, [PredictedLatency] first.
package handler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/admin"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/speculative"
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

// Handler routes requests for LLM engines. It stands where `reverse_proxy`
// stood, and does all that `reverse_proxy` does; what it adds is the choice of
// the upstream: a request goes to the engine whose KV cache already holds the
// beginning of its prompt, unless waiting there costs more than computing it
// elsewhere, and the turns of a session stay together.
//
// Inference requests are `POST` requests of OpenAI's chat, completions,
// responses and embeddings APIs, Anthropic's messages, SGLang's and vLLM's
// generate, and of rerank, score, classify and pooling. All others pass
// through, to the worker with the fewest requests.
//
// A request that a worker refuses (connection failed, or closed without an
// answer, or status 429, 503 or 529) is sent to another worker, as long as
// there is one and nothing of an answer was forwarded; after a connection that
// closed without an answer once only. When none is left, the last engine's answer
// reaches the client as it is.
//
// With Caddy's `tracing` handler before it, a request has a span
// `kv_router.route_request` over all its attempts, which is the engine's parent,
// and in it a span `kv_router.select_worker` for each choice of a worker.
//
// These placeholders are set, for use in header operations and in handlers
// that run after the choice; those with a `*` are known only after the answer,
// for example in access logs:
//
// Placeholder | Description
// ------------|-------------
// `{http.kv_router.worker}` | The id of the chosen worker
// `{http.kv_router.dp_rank}` | The chosen data-parallel rank
// `{http.kv_router.overlap_blocks}` | Leading KV blocks of the prompt that the worker holds
// `{http.kv_router.predicted_cached_tokens}` | The same in tokens
// `{http.kv_router.reason}` | Why this worker: `session`, `overlap` (the policy's choice, and it holds a part), `load` (the policy's choice, and it holds nothing), `pin` (the request names it), `response` (it keeps the response that the request names)
// `{http.kv_router.session}` | The session key, if the request has one
// `{http.kv_router.cached_tokens}` * | Cached prompt tokens as the engine reported them
type Handler struct {
	// Names the pool: the workers and all that is known about them. Handlers
	// that name the same pool share it; it survives configuration reloads.
	// Default: `default`.
	Pool string `json:"pool,omitempty"`

	// The policy that chooses among the workers. Default: `predicted_latency`.
	PolicyRaw json.RawMessage `json:"policy,omitempty" caddy:"namespace=http.handlers.kv_router.policies inline_key=policy"`

	// A policy that decides beside the active one, on the same state of the
	// workers, and steers nothing. How often both agree is counted; where they
	// differ, both choices are logged at level debug. Default: none.
	ShadowRaw json.RawMessage `json:"shadow,omitempty" caddy:"namespace=http.handlers.kv_router.policies inline_key=policy"`

	// The type of the engines: `vllm`, `sglang`, `trtllm`, `llamacpp`,
	// `dynamo`, `other`, or `auto`: each worker's is found out from what it
	// serves. Whatever is said here, it is asked for its figures; where these
	// contradict the configuration, that counts, and the log has a warning.
	// Default: `auto`.
	Engine string `json:"engine,omitempty"`

	// Settings of workers, by their dial address. One with the address `*`
	// gives the defaults of all.
	Workers []*pool.WorkerSettings `json:"workers,omitempty"`

	// The index of what the workers' KV caches hold.
	Index *Index `json:"index,omitempty"`

	// How sessions are recognized and kept.
	Affinity *Affinity `json:"affinity,omitempty"`

	// How requests wait while all workers have as many as their `max_running`.
	Queue *Queue `json:"queue,omitempty"`

	// How long workers may be silent. Default: as long as the reverse proxy
	// lets them.
	Timeouts *dispatch.Timeouts `json:"timeouts,omitempty"`

	// What retries may be made, in proportion to requests. Default: 20 percent
	// and 10 a second.
	RetryBudget *RetryBudget `json:"retry_budget,omitempty"`

	// The largest request body, in bytes, that is read into memory. Larger
	// ones are streamed through to the least loaded worker. Default: 64 MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// If set, responses say how they were routed, in headers whose names begin
	// with this prefix: `Worker`, `Dp-Rank`, `Reason`, `Overlap-Blocks`,
	// `Predicted-Cached-Tokens`. Default: none, for they show topology.
	ResponseHeaders string `json:"response_headers,omitempty"`

	// With `inject`, the engines are asked for the usage of streams whose
	// client did not ask for it, and the chunk that they add is taken out
	// again: so that hit ratios are known of all streams. Default: clients'
	// requests go as they are.
	Usage string `json:"usage,omitempty"`

	// Whose wishes are honoured that clients utter in `nvext` and in routing
	// headers. Entries add up. Default: nobody's.
	Trust []*Trust `json:"trust,omitempty"`

	// With `strict`, fields of `nvext` that are not known are an error (400).
	// Default: they are passed over.
	NVExt string `json:"nvext,omitempty"`

	// With `enforce`, requests that have a salt, their tenant's or their own, go
	// only to workers whose engines are known to keep caches with different salts
	// apart in the API that is called, see the `cache_salt` of workers; if there
	// is none, they are refused (400). Default: the engine gets the salt where it
	// takes one, and elsewhere prompts share its cache.
	CacheSalt string `json:"cache_salt,omitempty"`

	// With `direct`, every inference request must name its worker, in `nvext` or
	// by header, and everybody is trusted with `pins`: somebody else chooses.
	// Default: the policy chooses for requests that name none.
	Mode string `json:"mode,omitempty"`

	// Whether clients may have the beginning of their session's next turn
	// computed beforehand, as they ask for it with the hint
	// `speculative_prefill` of `nvext`: after a turn that has ended well, the
	// worker that answered is sent the prompt with the answer, for one token.
	// It costs engines time that nobody may ever make use of. Default: `false`.
	SpeculativePrefill bool `json:"speculative_prefill,omitempty"`

	// Whether an engine's answer to `GET /v1/models` is completed with the
	// models that only other workers of the pool serve. Default: `true`.
	MergeModels *bool `json:"merge_models,omitempty"`

	// The reverse proxy that performs the round trips, with everything that
	// Caddy's own has. Only its selection policy must not be set.
	ReverseProxy *reverseproxy.Handler `json:"reverse_proxy,omitempty"`

	policy     kvscore.Policy
	keys       []plan.KeySource
	settings   *pool.Settings
	config     *pool.SharedSettings // those of all handlers that name the pool
	pool       *pool.Pool
	adopted    atomic.Bool
	holdsPool  bool
	proxyReady bool
	reader     *plan.Reader
	dispatcher *dispatch.Dispatcher
	explainer  *admin.Explainer
	prober     *discovery.Prober
	transport  *upstream.Transport
	client     *upstream.Client
	metrics    *dispatch.Metrics
	figures    *dispatch.Figures
	ctx        context.Context // ends with the configuration
	notices    notices
	logger     *zap.Logger
}

// Index configures the model of the workers' KV caches. It belongs to the
// pool: handlers that name the pool must not contradict each other.
type Index struct {
	// The most memory that the index takes, in bytes. Default: 512 MiB.
	Memory int64 `json:"memory,omitempty"`

	// The number of tokens in one KV block of the engines. Default: what all
	// engines tell that tell it, if it is the same, in multiples up to at least
	// 16; else 16.
	BlockSize int `json:"block_size,omitempty"`

	// The number of bytes in one block of prompt text, which prompts are
	// compared by where their tokens are unknown. Default: 64.
	TextBlock int `json:"text_block,omitempty"`
}

// Affinity configures sessions. What concerns their storage belongs to the
// pool: handlers that name the pool must not contradict each other.
type Affinity struct {
	// What a session's binding to a worker is worth. `soft`: leaving that worker has
	// a price in the cost, so a turn goes elsewhere only where that is worth it, and
	// the session stays bound unless its worker has lost the prompt's beginning. Only
	// the policy `predicted_latency` knows the price; with another policy, `soft` is
	// `hard`. `hard`: all turns go to that worker while it is available. `off`: keys
	// are ignored. Turns of sessions that the engine itself holds (`session_params`)
	// are never sent elsewhere. Default: `soft`.
	Mode string `json:"mode,omitempty"`

	// How long a session is remembered after its last turn. Default: 5m.
	TTL caddy.Duration `json:"ttl,omitempty"`

	// The most sessions that are remembered; the longest idle go first.
	// Default: 1000000.
	MaxSessions int `json:"max_sessions,omitempty"`

	// Where a session's key is looked for, in this order: `nvext` (the body's
	// `nvext.session_control.session_id`, or `nvext.session_params.id`),
	// `header:<name>`,
	// `body:prompt_cache_key`, `body:session_id` or `body:metadata.user_id`.
	// The first that is not empty counts. Default: `nvext`,
	// `header:X-Session-Id`.
	Key []string `json:"key,omitempty"`
}

// Queue bounds the requests that wait while all workers that may serve them
// have as many as their `max_running`. They get room in the order in which their
// bodies had arrived, and by the priorities of clients that are trusted with these; clients
// that leave, leave the queue. It belongs to the pool: handlers
// that name the pool must not contradict each other.
type Queue struct {
	// The most requests that wait; of more, the last to arrive is answered with
	// 429 (`queue_full`). Default: 1024.
	MaxWaiting int `json:"max_waiting,omitempty"`

	// How long a request waits, over all its attempts, before it is answered
	// with 503 (`queue_timeout`). Default: 30s.
	MaxWait caddy.Duration `json:"max_wait,omitempty"`
}

// RetryBudget bounds the retries of the last ten seconds, so that workers that
// are ill are not killed by them: so many percent of the requests of that time
// and so many a second. Connections that could not be made are not charged, nor
// is what net/http sends again on a new connection because the worker had
// closed an idle one, nor what the operator's `retry_match` adds. It belongs to
// the pool: handlers that name the pool must not contradict each other.
type RetryBudget struct {
	// Retries, as a percentage of requests.
	Percent float64 `json:"percent"`

	// Retries a second beside these.
	PerSecond float64 `json:"per_second"`
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.kv_router",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision sets up the handler. The pool is not changed before the configuration
// serves: it may be provisioned and rejected.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger, h.ctx = ctx.Logger(), ctx
	h.dispatcher = new(dispatch.Dispatcher)
	if err := h.setDefaults(); err != nil {
		return err
	}
	if err := h.loadPolicy(ctx); err != nil {
		return err
	}
	h.priceLeaving()
	if err := h.loadTrust(ctx); err != nil {
		return err
	}
	registry := ctx.GetMetricsRegistry()
	h.metrics = dispatch.Register(registry, h.logger, admin.Collector{})
	h.figures = h.metrics.Of(h.Pool)
	if err := h.loadShadow(ctx); err != nil {
		return err
	}
	value, _, err := pool.Pools.LoadOrNew(h.Pool, func() (caddy.Destructor, error) { return pool.New(h.Pool, h.settings.WithDefaults()) })
	if err != nil {
		return fmt.Errorf("opening pool %s: %w", h.Pool, err)
	}
	h.pool, h.holdsPool = value.(*pool.Pool), true
	if h.config, err = h.pool.Agree(registry, h.settings); err != nil {
		return err
	}
	if err := h.wireProxy(ctx); err != nil {
		return err
	}
	if err := h.ReverseProxy.Provision(ctx); err != nil {
		return fmt.Errorf("provisioning reverse_proxy: %w", err)
	}
	h.proxyReady = true
	h.warn(proxyWarnings(h.ReverseProxy, h.transport.HTTPTransport))
	if err := h.wireRetries(ctx); err != nil {
		return err
	}
	h.prober = discovery.New(ctx, h.pool, h.ReverseProxy, h.client, h.config, h.logger)
	h.wireDispatcher()
	h.explainer.Join()
	go h.adoptWhenLive(ctx, registry)
	return nil
}

// wireProxy puts our selection and our transport into the proxy, which must be
// done before it is provisioned: its health checkers start there.
func (h *Handler) wireProxy(ctx caddy.Context) error {
	rp := h.ReverseProxy
	if rp.LoadBalancing == nil {
		rp.LoadBalancing = new(reverseproxy.LoadBalancing)
	}
	rp.LoadBalancing.SelectionPolicy = dispatch.Selector{}
	var err error
	h.transport, err = upstream.Load(ctx, rp, func(c net.Conn) net.Conn { return body.Conn{Conn: c} }, dispatch.AttemptOf)
	h.client = upstream.NewClient(rp, h.transport, func(dial string) string { return h.pool.Settings.Load().Worker(dial).APIKey })
	return err
}

// wireRetries takes the decision about retries from the proxy, once that is
// provisioned. What the operator has limited stays limited.
func (h *Handler) wireRetries(ctx caddy.Context) error {
	lb := h.ReverseProxy.LoadBalancing
	h.dispatcher.KeepBody = len(h.ReverseProxy.HandleResponse) > 0 || len(lb.RetryMatch) > 0
	h.dispatcher.Limits = dispatch.Limits{
		Duration: time.Duration(lb.TryDuration), Interval: time.Duration(lb.TryInterval), Retries: lb.Retries,
	}
	if !h.dispatcher.Limits.Set() {
		lb.Retries = math.MaxInt16 // each worker is tried once, which ends of itself
	}
	lb.TryInterval = 0 // waiting for another worker than the one that failed helps nobody
	ours, err := dispatch.RetryMatchers(ctx)
	if err != nil {
		return err
	}
	for _, set := range lb.RetryMatch {
		ours = append(ours, append(caddyhttp.MatcherSet{dispatch.AnotherMatcher{}}, set...))
	}
	lb.RetryMatch = ours
	return nil
}

// wireDispatcher completes the dispatcher.
func (h *Handler) wireDispatcher() {
	d := h.dispatcher
	d.Pool, d.Proxy, d.Transport, d.Client, d.Policy = h.pool, h.ReverseProxy, h.transport, h.client, h.policy
	d.Metrics, d.Figures, d.Logger, d.Context = h.metrics, h.figures, h.logger, h.ctx
	d.Labels, d.Speculative, d.Probes = h.ResponseHeaders, h.SpeculativePrefill, h.prober
	if h.Timeouts != nil {
		d.Timeouts = *h.Timeouts
	}
	d.FollowUps = speculative.NewRunner(d, h.SpeculativePrefill)
	h.reader = h.newReader()
	h.explainer = &admin.Explainer{Dispatcher: d, Reader: h.reader, Config: h.config}
}

// newReader returns the reader of the handler's requests.
func (h *Handler) newReader() *plan.Reader {
	p := h.pool
	return &plan.Reader{
		MaxBody: h.MaxBody, Keys: h.keys, HeldOnly: h.sessionMode() == affinityOff, InjectsUsage: h.Usage == usageInject,
		Strict: h.NVExt == nvextStrict, Direct: h.Mode == modeDirect, EnforcesSalt: h.CacheSalt == saltEnforce,
		MergesModels: h.MergeModels == nil || *h.MergeModels, Grants: h.grants,
		Memory: &p.Memory, Ratios: &p.Ratios, Hashing: p.Hashing, TakesTokens: h.prober.TakesTokenData,
		TTL:     func() time.Duration { return p.Settings.Load().TTL },
		Waiting: func() uint64 { return uint64(max(0, p.Queue.Length.Load())) },
	}
}

// Cleanup lets go of the pool. Requests may still be under way.
func (h *Handler) Cleanup() error {
	var err error
	if h.proxyReady {
		// after a failed Provision it would take hosts off a running config
		h.proxyReady = false
		err = h.ReverseProxy.Cleanup()
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
	h.adopt()
	h.prober.Await(r.Context())
	h.explainer.Follow()
	h.noticeServer(r)
	p, err := h.reader.Read(r)
	if err != nil {
		return h.refuse(w, r, err)
	}
	defer p.Close()
	if p.Ext.QueryOnly() {
		return h.answerQuery(w, r, p)
	}
	rt, err := h.dispatcher.Begin(r, p, start)
	if err != nil {
		p.GiveBack(r)
		return h.refuse(w, r, err)
	}
	defer rt.End()
	err = h.ReverseProxy.ServeHTTP(w, rt.Request(r), next)
	if err = answer(w, r, rt.Settle(w, r, err)); err != nil {
		body.GiveBack(r, rt.Body, p.Stream)
	}
	return err
}

// answerQuery answers a request that only asks where it would go.
func (h *Handler) answerQuery(w http.ResponseWriter, r *http.Request, p *plan.Plan) error {
	h.dispatcher.CountDropped(p)
	err := h.explainer.AnswerQuery(w, r, p)
	if err != nil {
		p.GiveBack(r)
	}
	return h.refuse(w, r, err)
}

// refuse counts and answers a request that was not dispatched.
func (h *Handler) refuse(w http.ResponseWriter, r *http.Request, err error) error {
	if e, ok := errors.AsType[*api.Refusal](err); ok {
		outcome := dispatch.OutcomeRejected
		if e.Code == api.CodeUnreadable || e.Code == api.CodeTooLarge {
			outcome = dispatch.OutcomeUnread
		}
		h.figures.Requests[outcome].Inc()
	}
	return answer(w, r, err)
}

// retryLater is what clients are told to wait when there is no worker, in seconds:
// about as long as a worker is marked down.
const retryLater = "2"

// answer answers with a refusal in the shape that the API's clients expect. It returns
// other errors as they are, and a refusal as an error for the server's error routes if
// there are any.
func answer(w http.ResponseWriter, r *http.Request, err error) error {
	e, ok := errors.AsType[*api.Refusal](err)
	if !ok {
		return err
	}
	switch {
	case e.RetryAfter > 0:
		w.Header().Set("Retry-After", strconv.Itoa(e.RetryAfter))
	case e.Status == http.StatusServiceUnavailable:
		w.Header().Set("Retry-After", retryLater)
	}
	server, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if e.API == nil || ok && server.Errors != nil {
		return caddyhttp.Error(e.Status, e.Err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.Status)
	_, err = w.Write(e.Body()) //nolint:gosec // JSON, and said to be
	return err
}

// setDefaults checks the configuration and fills in what it leaves out.
func (h *Handler) setDefaults() error {
	if h.Pool == "" {
		h.Pool = "default"
	}
	if h.MaxBody == 0 {
		h.MaxBody = 64 << 20
	}
	if h.MaxBody < 0 {
		return fmt.Errorf("max_body: must be positive, got %d", h.MaxBody)
	}
	if h.ReverseProxy == nil || (len(h.ReverseProxy.Upstreams) == 0 && h.ReverseProxy.DynamicUpstreamsRaw == nil) {
		return fmt.Errorf("no upstreams: kv_router needs at least one")
	}
	if lb := h.ReverseProxy.LoadBalancing; lb != nil && lb.SelectionPolicyRaw != nil {
		return errLBPolicy
	}
	if i := strings.IndexFunc(h.ResponseHeaders, notTokenChar); i >= 0 {
		return fmt.Errorf("response_headers: %q cannot begin a header's name", h.ResponseHeaders)
	}
	if t := h.Timeouts; t != nil && (t.FirstToken < 0 || t.StreamIdle < 0) {
		return fmt.Errorf("timeouts: must be positive, got first_token %s, stream_idle %s", time.Duration(t.FirstToken), time.Duration(t.StreamIdle))
	}
	if h.Usage != "" && h.Usage != usageInject {
		return fmt.Errorf("usage: must be inject, got %q", h.Usage)
	}
	var err error
	if err = h.checkAffinity(); err != nil {
		return err
	}
	if err = h.checkTrust(); err != nil {
		return err
	}
	h.settings, err = h.poolSettings()
	return err
}

// usageInject is the one value of Handler.Usage.
const usageInject = "inject"

var errLBPolicy = fmt.Errorf("lb_policy is not allowed in kv_router's reverse_proxy: use kv_router's policy")

func notTokenChar(r rune) bool {
	return r != '-' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
