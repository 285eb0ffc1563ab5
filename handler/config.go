package handler

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/admin"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Handler routes requests to LLM engines. It replaces `reverse_proxy`, does all that
// `reverse_proxy` does, and adds the choice of the upstream. A request goes to the engine
// whose KV cache already holds the beginning of its prompt, unless waiting there costs
// more than computing it elsewhere. The turns of a session stay together.
//
// Inference requests are `POST` requests of these APIs: OpenAI's chat, completions, responses
// and embeddings, Anthropic's messages, SGLang's and vLLM's generate, rerank, score, classify
// and pooling. All other requests pass through, to the worker with the fewest requests.
//
// If a worker refuses a request, the router sends it to another worker. It does so while
// there is another worker and no part of an answer was forwarded. A worker refuses by a
// failed connection, or by status 429, 503 or 529. A connection that closes without an answer,
// and a 502, are retried once only. When no worker is left, the client gets the last engine's answer
// unchanged. A stream whose engine dies later goes on at another worker, see `resume`.
//
// With Caddy's `tracing` handler before it, a request has a span
// `kv_router.route_request` over all its attempts, which is the parent of the engine's
// span. In it, each choice of a worker has a span `kv_router.select_worker`.
//
// The handler sets these placeholders, for header operations and for handlers that run
// after the choice. Placeholders with a `*` are known only after the answer, for example
// in access logs:
//
// Placeholder | Description
// ------------|-------------
// `{http.kv_router.worker}` | The id of the chosen worker
// `{http.kv_router.dp_rank}` | The chosen data-parallel rank
// `{http.kv_router.prefill_worker}` | The id of the worker that computes the prompt, if it is another one
// `{http.kv_router.prefill_dp_rank}` | Its data-parallel rank
// `{http.kv_router.overlap_blocks}` | Leading KV blocks of the prompt that the worker holds
// `{http.kv_router.predicted_cached_tokens}` | The same in tokens
// `{http.kv_router.reason}` | Why this worker. `session`: it has the session. `overlap`: the policy chose it, and it holds a part of the prompt. `load`: the policy chose it, and it holds nothing. `pin`: the request names it. `response`: it keeps the response that the request names. `overflow`: it is a backup, and no other worker could serve the request then.
// `{http.kv_router.request_id}` | The client's `X-Request-Id`, else a random id
// `{http.kv_router.model}` | The model that the request names; empty if it names none
// `{http.kv_router.engine_model}` | The name that the worker gets, if the client's is a public name
// `{http.kv_router.priority}` | The client's priority, if `trust` grants `priorities`; else 0
// `{http.kv_router.class}` | The class of the request; empty if there are no classes
// `{http.kv_router.tenant}` | The tenant of the request; empty if it has none
// `{http.kv_router.session}` | The hash of the session, if the request has one
// `{http.kv_router.cached_tokens}` * | Cached prompt tokens as the engine reported them
type Handler struct { // one field for each option, hence so many
	// The name of the pool: the workers and all that the router knows of them. Handlers
	// that name the same pool share it, and must agree on its settings. A pool survives
	// reloads. Default: `default`.
	Pool string `json:"pool,omitempty"`

	// The policy that chooses among the workers. Default: `predicted_latency`.
	PolicyRaw json.RawMessage `json:"policy,omitempty" caddy:"namespace=http.handlers.kv_router.policies inline_key=policy"`

	// A policy that decides beside the active one, on the same state of the workers,
	// without effect. The router counts how often both agree. Where they differ, it logs
	// both choices at level debug. Default: none.
	ShadowRaw json.RawMessage `json:"shadow,omitempty" caddy:"namespace=http.handlers.kv_router.policies inline_key=policy"`

	// The type of the engines: `vllm`, `sglang`, `trtllm`, `llamacpp`, `dynamo`,
	// `other`, or `auto`. With `auto` the router detects each worker's type. The router
	// also asks engines of a configured type for their figures. Where these contradict
	// the configuration, the configuration counts, and the router logs a warning. It
	// asks engines of the type `other` for nothing but their models. Default: `auto`.
	Engine string `json:"engine,omitempty"`

	// The settings of workers, by their dial address. The address `*` gives the defaults
	// of all workers. Default: none, and the router uses what the engines report.
	Workers []*worker.Settings `json:"workers,omitempty"`

	// The index of what the workers' KV caches hold.
	Index *pool.Index `json:"index,omitempty"`

	// How the router recognizes and keeps sessions.
	Affinity *Affinity `json:"affinity,omitempty"`

	// How requests wait while all workers are at `max_running`.
	Queue *pool.Queue `json:"queue,omitempty"`

	// What each tenant may use. Default: no limits.
	Limits *pool.Limits `json:"limits,omitempty"`

	// What the router keeps on disk for its next run.
	Journal *pool.Journal `json:"journal,omitempty"`

	// The other routers in front of the same engines.
	Share *pool.Share `json:"share,omitempty"`

	// How long workers may be silent. Default: as long as the reverse proxy allows.
	Timeouts *attempt.Timeouts `json:"timeouts,omitempty"`

	// What becomes of streams whose engine dies. Default: they go on at other workers.
	Resume *resume.Config `json:"resume,omitempty"`

	// How long a stream may be silent. Its client then gets a comment of server-sent events, at
	// least that often. If the answer's header takes so long, the client gets the router's own: status
	// 200 and `text/event-stream`. Later errors reach it as error events. Negative turns it off.
	// Default: `15s`; where the server has error routes, or the proxy `handle_response`, without
	// the router's own header.
	Keepalive caddy.Duration `json:"keepalive,omitempty"`

	// How many retries are allowed, in proportion to requests. Default: 20 percent of
	// the requests and 10 a second.
	RetryBudget *pool.RetryBudget `json:"retry_budget,omitempty"`

	// The largest request body, in bytes, that the router reads into memory. It streams
	// a larger one to the least loaded worker. It refuses a larger one with 413 if the
	// request is a tenant's or `enforce_cache_salt` is on. Default: 64 MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// The beginning of the names of headers in which answers say how they were routed:
	// `Worker`, `Dp-Rank`, `Reason`, `Overlap-Blocks`, `Predicted-Cached-Tokens` and
	// `Request-Id`. If they apply, there are also `Prefill-Worker`, `Prefill-Dp-Rank`,
	// `Engine-Model`, `Session-Source` and `Session-State`.
	// Default: none, because these headers show topology.
	ResponseHeaders string `json:"response_headers,omitempty"`

	// Whether answers have the header `Server-Timing`, which browsers show. It has the times in
	// the queue, on the way to the engine, and until the engine's header. Streams have the time
	// to the first token as a trailer. Default: `false`.
	ServerTiming bool `json:"server_timing,omitempty"`

	// Whether answers have the header `Cache-Status` (RFC 9211): how many tokens of the prompt
	// the engine has in its KV cache, as predicted. Default: `false`.
	CacheStatus bool `json:"cache_status,omitempty"`

	// Whether the router asks engines for the usage of streams whose client did not ask
	// for it. It takes the added chunk out of the answer again. Hit ratios then include
	// all streams. Default: `false`.
	InjectUsage bool `json:"inject_usage,omitempty"`

	// A placeholder with the name of the request's tenant: who pays for it. Where requests
	// wait, the tenants of a class share the engines evenly. Default: the header
	// `X-Tenant-Id` if `trust` grants `tenants`, else the `scope` of `affinity`, which is
	// `{http.auth.user.id}` by default. All requests without a tenant are one tenant's.
	Tenant string `json:"tenant,omitempty"`

	// The classes of requests: how urgent they are. Default: one for all requests.
	Classes []*Class `json:"classes,omitempty"`

	// What the router grants to which clients: wishes in `nvext` and in routing headers.
	// Entries add up. Default: nothing to any client.
	Trust []*Trust `json:"trust,omitempty"`

	// Whether requests with a salt go only to workers that keep caches with different salts
	// apart. The salt is the tenant's or the client's. See the `cache_salt` of workers. If there
	// is no such worker, the router refuses the request (400). It also refuses bodies
	// that it cannot read. Otherwise, engines that accept a salt get it, and prompts
	// share the cache of other engines. Default: `false`.
	EnforceCacheSalt bool `json:"enforce_cache_salt,omitempty"`

	// Whether every inference request must name its worker, in `nvext` or by header,
	// because another system chooses. The router then grants `pins` to all clients, and
	// refuses requests that name no worker (400). Default: `false`.
	RequirePin bool `json:"require_pin,omitempty"`

	// Whether the router honours the hint `speculative_prefill` of `nvext`. After a turn
	// that ended well, the worker that answered then gets the prompt with the answer, for
	// one token. So it has computed the beginning of the session's next turn in advance.
	// This may waste the engines' time. Default: `false`.
	SpeculativePrefill bool `json:"speculative_prefill,omitempty"`

	// Public names of models. Clients use them, and engines get the names that they know.
	// Default: none, and clients use the engines' names.
	Models []plan.PublicModel `json:"models,omitempty"`

	// Which requests are split: a worker for `prefill` computes the prompt, and one for
	// `decode` the answer. The values are:
	//
	// - `auto`: a request that is predicted to cost less time then.
	// - `always`: each one that can be split.
	// - `never`: none.
	//
	// Default: `auto`.
	Split string `json:"split,omitempty"`

	// The reverse proxy that performs the round trips, with all options of Caddy's own
	// except the selection policy. It needs at least one upstream, or a dynamic source.
	ReverseProxy *reverseproxy.Handler `json:"reverse_proxy,omitempty"`

	phases     kvscore.SplitRule
	policy     kvscore.Policy
	shadow     kvscore.Policy // nil if none is configured
	keys       []plan.KeySource
	public     plan.PublicModels
	rest       *queue.Class                          // of requests that no class takes
	named      func() (caddy.ModuleMap, bool, error) // reads the name of a named matcher of the Caddyfile
	backups    pool.Backups
	settings   *pool.Settings
	config     *pool.SharedSettings // those of all handlers that name the pool
	pool       *pool.Pool
	adopting   sync.Once
	adopted    atomic.Bool
	holdsPool  bool
	proxyReady bool
	reader     *plan.Reader
	dispatcher *dispatch.Dispatcher
	explainer  *admin.Explainer
	prober     *discovery.Prober
	transport  *upstream.Transport
	forget     func() // the addresses of dynamic upstreams
	client     *upstream.Client
	ctx        context.Context      // ends with the configuration
	registry   *prometheus.Registry // the configuration's
	noticed    atomic.Bool          // the server's settings were checked
	logger     *zap.Logger
}

// Affinity configures sessions. All handlers of a pool must agree on `ttl` and
// `max_sessions`.
type Affinity struct {
	pool.Sessions

	// How strongly a session is bound to its worker: `soft`, `hard` or `off`.
	//
	// `soft`: leaving the worker has a price in the cost, so a turn goes elsewhere only if
	// that is cheaper. The session stays bound unless its worker has lost the beginning of
	// the prompt. Only the policy `predicted_latency` knows the price; with another
	// policy, turns go elsewhere only while the worker is full or unavailable.
	//
	// `hard`: all turns go to that worker while it is available. While it is full, they wait
	// in the queue for it.
	//
	// `off`: the router ignores session keys. Turns of sessions that the engine itself
	// holds (`session_params`) still go to their worker.
	//
	// Default: `soft`.
	Mode string `json:"mode,omitempty"`

	// The places of a session's key, in order. The first that is not empty counts. Places
	// are:
	//
	// - `nvext`: the body's `nvext.session_control.session_id` or
	//   `nvext.session_params.id`.
	// - `header:<name>`, `cookie:<name>` or `query:<name>`.
	// - A placeholder, such as `{http.request.uri.query.chat}`.
	// - `body:prompt_cache_key`, `body:conversation` or `body:session_id`.
	// - `body:metadata.user_id`: the session that Claude Code writes in it.
	// - `body:previous_response_id`: the session of that response.
	//
	// Default: `nvext`, `header:X-Dynamo-Session-Id`, `header:X-Claude-Code-Session-Id`,
	// `header:Thread-Id`, `header:X-Deepseek-Harness-Session-Id`, `header:X-Session-Id`,
	// `body:prompt_cache_key`, `body:metadata.user_id`, `body:conversation`,
	// `body:previous_response_id`.
	Key []string `json:"key,omitempty"`

	// A placeholder that keeps sessions apart: sessions with equal keys and different
	// values of it have nothing in common. The tenant and the cache salt of a request keep
	// sessions apart in any case. Default: `{http.auth.user.id}`.
	Scope string `json:"scope,omitempty"`
}

// The values of Affinity.Mode.
const (
	affinitySoft = "soft"
	affinityHard = "hard"
	affinityOff  = "off"
)

func (h *Handler) setDefaults() error {
	h.Pool = cmp.Or(h.Pool, pool.DefaultName)
	h.MaxBody = cmp.Or(h.MaxBody, 64<<20)
	if h.MaxBody < 0 {
		return fmt.Errorf("max_body: must be positive, got %d", h.MaxBody)
	}
	if h.ReverseProxy == nil || (len(h.ReverseProxy.Upstreams) == 0 && h.ReverseProxy.DynamicUpstreamsRaw == nil) {
		return fmt.Errorf("no upstreams: kv_router needs at least one")
	}
	if lb := h.ReverseProxy.LoadBalancing; lb != nil && lb.SelectionPolicyRaw != nil {
		return errLBPolicy
	}
	if h.ResponseHeaders != "" && !httpguts.ValidHeaderFieldName(h.ResponseHeaders) {
		return fmt.Errorf("response_headers: must be the beginning of a header's name, got %q", h.ResponseHeaders)
	}
	if t := valueOf(h.Timeouts); t.FirstToken < 0 {
		return fmt.Errorf("timeouts first_token: must be positive, got %s", time.Duration(t.FirstToken))
	} else if t.StreamIdle < 0 {
		return fmt.Errorf("timeouts stream_idle: must be positive, got %s", time.Duration(t.StreamIdle))
	}
	rule := slices.Index(kvscore.SplitNames[:], cmp.Or(h.Split, kvscore.SplitAuto.String()))
	if rule < 0 {
		return fmt.Errorf("split: must be auto, always or never, got %q", h.Split)
	}
	h.phases = kvscore.SplitRule(rule) //nolint:gosec // it is one of them
	if h.Resume == nil {
		h.Resume = new(resume.Config)
	}
	for _, check := range []func() error{h.Resume.Complete, h.checkAffinity, h.checkTrust, h.checkWho} {
		if err := check(); err != nil {
			return err
		}
	}
	var err error
	if h.public, err = plan.NewPublicModels(h.Models); err != nil {
		return err
	}
	h.settings, err = h.poolSettings()
	return err
}

var errLBPolicy = fmt.Errorf("lb_policy is not allowed in kv_router's reverse_proxy: use kv_router's policy")

func (h *Handler) sessionMode() string {
	return cmp.Or(valueOf(h.Affinity).Mode, affinitySoft)
}

func (h *Handler) checkAffinity() error {
	switch mode := h.sessionMode(); mode {
	case affinitySoft, affinityHard, affinityOff:
	default:
		return fmt.Errorf("affinity mode: must be soft, hard or off, got %q", mode)
	}
	a, names := valueOf(h.Affinity), plan.DefaultKeys
	if len(a.Key) > 0 {
		names = a.Key
	}
	if _, ok := plan.PlaceholderName(a.Scope); a.Scope != "" && !ok {
		return fmt.Errorf("affinity scope: must be a placeholder such as {http.auth.user.id}, got %q", a.Scope)
	}
	for _, name := range names {
		source, err := plan.ParseKeySource(name)
		if err != nil {
			return err
		}
		h.keys = append(h.keys, source)
	}
	return nil
}

func (h *Handler) poolSettings() (*pool.Settings, error) {
	dynamic := h.ReverseProxy.DynamicUpstreamsRaw != nil
	s := &pool.Settings{
		Engine: h.Engine, Others: dynamic, RetryBudget: h.RetryBudget,
		Index: valueOf(h.Index), Queue: valueOf(h.Queue), Limits: valueOf(h.Limits), Journal: valueOf(h.Journal), Share: valueOf(h.Share),
		Sessions:  valueOf(h.Affinity).Sessions,
		Workers:   make(map[string]worker.Settings, len(h.Workers)),
		Upstreams: make(map[string]bool, len(h.ReverseProxy.Upstreams)),
	}
	s.Limits.Classes, s.Targets = make(map[string][]quota.Limit), make(map[string]bool)
	for _, c := range h.Classes {
		if c.TTFT > 0 || c.TTFTFrom != "" {
			s.Targets[c.Name] = lates[c.Late] != queue.Serve
		}
		if len(c.Limits) > 0 {
			s.Limits.Classes[c.Name] = c.Limits
		}
	}
	for _, up := range h.ReverseProxy.Upstreams {
		if up == nil {
			return nil, errors.New("reverse_proxy: an upstream must not be null")
		}
		s.Upstreams[up.Dial] = true
		s.Others = s.Others || strings.Contains(up.Dial, "{")
	}
	if err := s.Check(); err != nil {
		return nil, err
	}
	for _, w := range h.Workers {
		if err := s.Add(w, dynamic); err != nil {
			return nil, err
		}
	}
	return s, s.CheckIDs()
}

// valueOf returns the value of a part of the configuration, the zero value if it is left out.
func valueOf[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
