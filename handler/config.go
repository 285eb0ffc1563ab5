package handler

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/admin"
	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Handler routes requests to LLM engines. It replaces `reverse_proxy`, and does all that
// `reverse_proxy` does. It adds the choice of the upstream: a request goes to the engine
// whose KV cache already holds the beginning of its prompt, unless waiting there costs
// more than computing it elsewhere. The turns of a session stay together.
//
// Inference requests are `POST` requests of OpenAI's chat, completions, responses and
// embeddings APIs, Anthropic's messages, SGLang's and vLLM's generate, and of rerank,
// score, classify and pooling. All others pass through, to the worker with the fewest
// requests.
//
// If a worker refuses a request, the router sends it to another worker, as long as there
// is one and no part of an answer was forwarded. A worker refuses by a failed connection,
// by closing it without an answer (retried once only), or by status 429, 503 or 529. When
// no worker is left, the client gets the last engine's answer unchanged.
//
// With Caddy's `tracing` handler before it, a request has a span
// `kv_router.route_request` over all its attempts, which is the parent of the engine's
// span. In it, each choice of a worker has a span `kv_router.select_worker`.
//
// The handler sets these placeholders, for header operations and for handlers that run
// after the choice. Those with a `*` are known only after the answer, for example in
// access logs:
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
type Handler struct { // one field for each option, hence so many
	// The name of the pool: the workers and all that is known about them. Handlers
	// that name the same pool share it; it survives configuration reloads.
	// Default: `default`.
	Pool string `json:"pool,omitempty"`

	// The policy that chooses among the workers. Default: `predicted_latency`.
	PolicyRaw json.RawMessage `json:"policy,omitempty" caddy:"namespace=http.handlers.kv_router.policies inline_key=policy"`

	// A policy that decides beside the active one, on the same state of the workers,
	// without effect. The router counts how often both agree, and logs both choices at
	// level debug where they differ. Default: none.
	ShadowRaw json.RawMessage `json:"shadow,omitempty" caddy:"namespace=http.handlers.kv_router.policies inline_key=policy"`

	// The type of the engines: `vllm`, `sglang`, `trtllm`, `llamacpp`, `dynamo`,
	// `other`, or `auto`, which detects each worker's type from what it serves. The
	// router asks engines for their figures in any case. Where these contradict the
	// configuration, the configuration counts, and the router logs a warning.
	// Default: `auto`.
	Engine string `json:"engine,omitempty"`

	// Settings of workers, by their dial address. The address `*` gives the defaults
	// of all.
	Workers []*pool.WorkerSettings `json:"workers,omitempty"`

	// The index of what the workers' KV caches hold.
	Index *Index `json:"index,omitempty"`

	// How sessions are recognized and kept.
	Affinity *Affinity `json:"affinity,omitempty"`

	// How requests wait while all workers are at `max_running`.
	Queue *Queue `json:"queue,omitempty"`

	// How long workers may be silent. Default: as long as the reverse proxy allows.
	Timeouts *dispatch.Timeouts `json:"timeouts,omitempty"`

	// How many retries are allowed, in proportion to requests. Default: 20 percent
	// and 10 a second.
	RetryBudget *RetryBudget `json:"retry_budget,omitempty"`

	// The largest request body, in bytes, that is read into memory. Larger ones are
	// streamed to the least loaded worker. Default: 64 MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// If set, responses say how they were routed, in headers whose names begin with
	// this prefix: `Worker`, `Dp-Rank`, `Reason`, `Overlap-Blocks`,
	// `Predicted-Cached-Tokens`. Default: none, because they show topology.
	ResponseHeaders string `json:"response_headers,omitempty"`

	// With `inject`, the router asks engines for the usage of streams whose client did
	// not ask for it, and removes the added chunk again. Hit ratios are then known of
	// all streams. Default: clients' requests stay unchanged.
	Usage string `json:"usage,omitempty"`

	// Which clients' wishes are honoured, in `nvext` and in routing headers. Entries
	// add up. Default: no client's.
	Trust []*Trust `json:"trust,omitempty"`

	// With `strict`, unknown fields of `nvext` are an error (400). Default: they are
	// ignored.
	NVExt string `json:"nvext,omitempty"`

	// With `enforce`, requests with a salt, their tenant's or their own, go only to
	// workers whose engines are known to keep caches with different salts apart in the
	// API that is called; see the `cache_salt` of workers. If there is none, they are
	// refused (400). Default: engines that accept a salt get it; on others, prompts
	// share the cache.
	CacheSalt string `json:"cache_salt,omitempty"`

	// With `direct`, another system chooses: every inference request must name its
	// worker, in `nvext` or by header, and all clients are trusted with `pins`.
	// Default: the policy chooses for requests that name none.
	Mode string `json:"mode,omitempty"`

	// Whether clients may ask, with the hint `speculative_prefill` of `nvext`, that the
	// beginning of their session's next turn be computed in advance. After a turn that
	// ended well, the worker that answered gets the prompt with the answer, for one
	// token. This costs engines time that may be wasted. Default: `false`.
	SpeculativePrefill bool `json:"speculative_prefill,omitempty"`

	// Whether the router adds to an engine's answer to `GET /v1/models` the models that
	// only other workers of the pool serve. Default: `true`.
	MergeModels *bool `json:"merge_models,omitempty"`

	// The reverse proxy that performs the round trips, with all options of Caddy's own
	// except the selection policy.
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
	ctx        context.Context      // ends with the configuration
	registry   *prometheus.Registry // the configuration's
	noticed    atomic.Bool          // the server's settings were checked
	logger     *zap.Logger
}

// Index configures the cache model. All handlers of a pool must agree on it.
type Index struct {
	// The most memory that the index uses, in bytes. Default: 512 MiB.
	Memory int64 `json:"memory,omitempty"`

	// The number of tokens in one KV block of the engines. Default: what the engines
	// report, if they agree, in multiples up to at least 16; else 16.
	BlockSize int `json:"block_size,omitempty"`

	// The number of bytes in one block of prompt text. Prompts whose tokens are unknown
	// are compared by these blocks. Default: 64.
	TextBlock int `json:"text_block,omitempty"`
}

// Affinity configures sessions. All handlers of a pool must agree on `ttl` and
// `max_sessions`.
type Affinity struct {
	// How strongly a session is bound to its worker. `soft`: leaving has a price in
	// the cost, so a turn goes elsewhere only if that is cheaper. The session stays
	// bound unless its worker has lost the beginning of the prompt. Only the policy
	// `predicted_latency` knows the price; with another policy, `soft` is `hard`.
	// `hard`: all turns go to that worker while it is available. `off`: keys are
	// ignored. Turns of sessions that the engine itself holds (`session_params`) never
	// go elsewhere. Default: `soft`.
	Mode string `json:"mode,omitempty"`

	// How long a session is remembered after its last turn. Default: 5m.
	TTL caddy.Duration `json:"ttl,omitempty"`

	// The most sessions that are remembered; the longest idle go first.
	// Default: 1000000.
	MaxSessions int `json:"max_sessions,omitempty"`

	// Where to look for a session's key, in this order: `nvext` (the body's
	// `nvext.session_control.session_id` or `nvext.session_params.id`),
	// `header:<name>`, `body:prompt_cache_key`, `body:session_id` or
	// `body:metadata.user_id`. The first that is not empty counts.
	// Default: `nvext`, `header:X-Session-Id`.
	Key []string `json:"key,omitempty"`
}

// Queue bounds the requests that wait while all workers that may serve them are at
// `max_running`. Requests leave the queue in the order in which their bodies arrived,
// and by the priorities of clients that are trusted with these. A request whose client
// disconnects leaves the queue. All handlers of a pool must agree on it.
type Queue struct {
	// The most requests that wait. The last to arrive of more is answered with 429
	// (`queue_full`). Default: 1024.
	MaxWaiting int `json:"max_waiting,omitempty"`

	// How long a request waits, over all its attempts, before it is answered with 503
	// (`queue_timeout`). Default: 30s.
	MaxWait caddy.Duration `json:"max_wait,omitempty"`
}

// RetryBudget bounds the retries of the last ten seconds, so that they do not overload
// ailing workers: a percentage of the requests of that time, and a number a second.
// Three kinds are free: after connections that could not be made, those of net/http
// after the worker closed an idle connection, and those of the operator's
// `retry_match`. All handlers of a pool must agree on it.
type RetryBudget struct {
	// Retries, as a percentage of requests.
	Percent float64 `json:"percent"`

	// Further retries a second.
	PerSecond float64 `json:"per_second"`
}

// The values of options that take one of a few words. The default is the empty string,
// and that of Affinity.Mode is soft.
const (
	affinitySoft = "soft"
	affinityHard = "hard"
	affinityOff  = "off"

	modeDirect  = "direct"
	nvextStrict = "strict"
	saltEnforce = "enforce"
	usageInject = "inject"
)

// setDefaults checks the configuration and fills in what it leaves out.
func (h *Handler) setDefaults() error {
	h.Pool = cmp.Or(h.Pool, "default")
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
	if i := strings.IndexFunc(h.ResponseHeaders, notTokenChar); i >= 0 {
		return fmt.Errorf("response_headers: %q cannot begin a header's name", h.ResponseHeaders)
	}
	if t := h.Timeouts; t != nil && (t.FirstToken < 0 || t.StreamIdle < 0) {
		return fmt.Errorf("timeouts: must be positive, got first_token %s, stream_idle %s", time.Duration(t.FirstToken), time.Duration(t.StreamIdle))
	}
	for _, o := range []struct{ name, value, only string }{
		{"usage", h.Usage, usageInject},
		{"mode", h.Mode, modeDirect},
		{"cache_salt", h.CacheSalt, saltEnforce},
		{"nvext", h.NVExt, nvextStrict},
	} {
		if o.value != "" && o.value != o.only {
			return fmt.Errorf("%s: must be %s, got %q", o.name, o.only, o.value)
		}
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

var errLBPolicy = fmt.Errorf("lb_policy is not allowed in kv_router's reverse_proxy: use kv_router's policy")

func notTokenChar(r rune) bool {
	return r != '-' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
}

// sessionMode returns the configured mode, or the default.
func (h *Handler) sessionMode() string {
	if h.Affinity == nil {
		return affinitySoft
	}
	return cmp.Or(h.Affinity.Mode, affinitySoft)
}

// checkAffinity checks the mode and the places of keys.
func (h *Handler) checkAffinity() error {
	switch mode := h.sessionMode(); mode {
	case affinitySoft, affinityHard, affinityOff:
	default:
		return fmt.Errorf("affinity mode: must be soft, hard or off, got %q", mode)
	}
	names := []string{"nvext", "header:X-Session-Id"}
	if h.Affinity != nil && len(h.Affinity.Key) > 0 {
		names = h.Affinity.Key
	}
	for _, name := range names {
		source, err := plan.ParseKeySource(name)
		if err != nil {
			return err
		}
		if header, ok := strings.CutPrefix(name, "header:"); ok && strings.ContainsAny(header, "_.") {
			h.logger.Warn("Caddy drops request headers with such a name unless the server's expected_underscore_headers lists it: " + header)
		}
		h.keys = append(h.keys, source)
	}
	return nil
}

// poolSettings returns the settings of the pool that the configuration names.
func (h *Handler) poolSettings() (*pool.Settings, error) {
	dynamic := h.ReverseProxy.DynamicUpstreamsRaw != nil
	s := &pool.Settings{
		Engine: h.Engine, Others: dynamic,
		Workers:   make(map[string]pool.WorkerSettings, len(h.Workers)),
		Upstreams: make(map[string]bool, len(h.ReverseProxy.Upstreams)),
	}
	if ix := h.Index; ix != nil {
		s.Memory, s.BlockSize, s.TextBlock = ix.Memory, ix.BlockSize, ix.TextBlock
	}
	if a := h.Affinity; a != nil {
		s.TTL, s.MaxSessions = time.Duration(a.TTL), a.MaxSessions
	}
	if q := h.Queue; q != nil {
		s.MaxWaiting, s.MaxWait = q.MaxWaiting, time.Duration(q.MaxWait)
	}
	if b := h.RetryBudget; b != nil {
		s.Retries = pool.RetryBudget{Set: true, Percent: b.Percent, Rate: b.PerSecond}
	}
	for _, up := range h.ReverseProxy.Upstreams {
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
