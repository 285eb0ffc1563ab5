package worker

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"golang.org/x/net/http/httpguts"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Settings are the operator's settings of one worker. All handlers of a pool must
// agree on them.
type Settings struct { // one field for each option
	// The worker's dial address, as among the upstreams. `*` sets the defaults of all
	// workers.
	Dial string `json:"dial"`

	// The worker's id, a number of at most 2^53 - 1, unique in its pool. Clients pin
	// requests to it, and metrics and logs show it. Default: derived from the address.
	ID uint64 `json:"id,omitempty"`

	// The type of this worker's engine, with the values of the handler's `engine`.
	// Default: the handler's `engine`.
	Engine string `json:"engine,omitempty"`

	// The number of data-parallel ranks of the engine, at most 1024. Each rank has its
	// own KV cache, and the router sends each request to one rank. vLLM and SGLang read
	// the rank in the header `X-Data-Parallel-Rank`, SGLang also in the body. TensorRT-LLM,
	// llama.cpp, Dynamo and vLLM before 0.11 choose the rank themselves. Default: what the
	// engine reports, else 1.
	DPSize int `json:"dp_size,omitempty"`

	// The most inference requests that the worker has at a time, or `auto`. `auto` is
	// what the engine reports: SGLang's `max_running_requests` over all ranks, or
	// llama.cpp's slots. The router follows changes of it. An engine that reports nothing
	// has no limit with `auto`, and the router logs a warning. Further requests go to
	// other workers, and wait in the queue if all workers are full. A session whose
	// worker is full has this turn elsewhere and stays bound. Default: no limit.
	MaxRunning RequestLimit `json:"max_running,omitempty"`

	// The size of the engine's KV cache in tokens, of each rank if it has several.
	// Default: what the engine reports, else 262144.
	KVTokens int64 `json:"kv_tokens,omitempty"`

	// The names of the models that the engine serves. Requests for other models go to
	// other workers. If all workers have such a list and none has the model, the router
	// answers with 404. Default: what the engine lists, which the router asks for every
	// four seconds.
	Models []string `json:"models,omitempty"`

	// The key that the router sends with its own requests to the engine, as
	// `Authorization: Bearer`. The router does not change the headers of clients'
	// requests. Placeholders are allowed. Default: none.
	APIKey string `json:"api_key,omitempty"`

	// Whether the engine orders requests by priority: `on`, `off` or `auto`. If it does,
	// the router sends it the priority of `nvext.agent_hints.priority` in the engine's own
	// form. Engines without priority scheduling may refuse such requests. `auto` is what
	// the engine reports (SGLang), else off. Default: `auto`.
	Priority string `json:"priority,omitempty"`

	// Whether the engine limits reasoning tokens: `on`, `off` or `auto`. If it does, the
	// router sends it `nvext.max_thinking_tokens`. Other engines may refuse such requests.
	// `auto` is what the engine reports (SGLang), on for llama.cpp, and off for others.
	// Default: `auto`.
	ThinkingBudget string `json:"thinking_budget,omitempty"`

	// Whether the engine keeps the caches of requests with different salts apart: `on`,
	// `off` or `auto`. It matters only with the handler's `enforce_cache_salt`. `auto` is
	// what the router knows of the engine's type, version and API. Default: `auto`.
	CacheSalt string `json:"cache_salt,omitempty"`

	// Whether the engine holds sessions that the router opens and closes: `on`, `off` or
	// `auto`. `auto` is SGLang's `/generate`, unless the engine reports that its streaming
	// sessions are off. `on` adds chat and completions, for builds of SGLang that heed
	// `session_params` there; others lose the context without an error. Default: `auto`.
	Sessions string `json:"sessions,omitempty"`

	// Where the worker publishes the events of its KV cache. Default: what the engine reports.
	KVEvents *KVEventsSettings `json:"kv_events,omitempty"`

	// Whether the router asks the engine for its load about once a second. It then sees what
	// other clients send to the engine, such as a second router. vLLM and SGLang report their
	// load, llama.cpp with `--metrics`. The router needs no answer. Default: `false`.
	EngineLoad *bool `json:"engine_load,omitempty"`

	// The instance behind a Dynamo frontend that serves the requests which are pinned to
	// this worker. In JSON it is a string, because Caddy rounds large numbers.
	// Default: none, and the frontend chooses.
	DynamoInstanceID uint64 `json:"dynamo_instance_id,omitempty,string"`

	// Whether the worker drains: it gets no new requests, and its active requests end
	// there. Its sessions move with their next turn. If no other worker can serve a
	// request, the router uses a draining worker. The admin API can drain a worker, too.
	// Such a drain survives reloads, whatever this option says. It ends by the admin API or
	// a restart. Default: `false`.
	Drain *bool `json:"drain,omitempty"`

	// Whether a request wakes the worker's engine if that sleeps, and no other worker that is awake
	// can serve the request. It waits in the queue meanwhile. Only vLLM says that it sleeps.
	// Default: `false`.
	Wake *bool `json:"wake,omitempty"`

	// Which part of requests the worker serves: `both`, `prefill`, `decode` or `backup`. A
	// worker for `prefill` computes prompts, and one for `decode` the answers to them. Requests
	// that cannot be divided go whole to workers of the other roles, if their engine can serve
	// them. See the handler's `split`. A `backup` gets inference requests that no other worker
	// can serve now. It needs `models`. Default: what the engine reports (SGLang does), else
	// `both`.
	Role string `json:"role,omitempty"`

	// The headers that a `backup` gets, such as `Authorization`. It also gets those of a client's
	// headers that describe the body and the answer. Placeholders are allowed. Default: none.
	Headers map[string]string `json:"header,omitempty"`

	// The name of the model in requests to a `backup`. Answers carry the client's. Default: the same.
	Model string `json:"model,omitempty"`

	// The matchers of the requests that may go to a `backup`. They know the placeholders
	// `{http.kv_router.model}`, `{http.kv_router.tenant}` and `{http.kv_router.class}`. A matcher
	// that fails matches nothing. Default: all requests.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// The port of the bootstrap server of a vLLM for prefills that hands prompts over with the
	// Mooncake connector: its `VLLM_MOONCAKE_BOOTSTRAP_PORT`. vLLM does not report it. It has no
	// effect for workers of other roles. Default: none, for the NIXL connectors.
	MooncakePort int `json:"mooncake_port,omitempty"`

	// Words by which clients with the grant `overrides` require or prefer workers
	// (`nvext.routing_constraints`), at most 64 of up to 256 bytes each. Default: none.
	Taints []string `json:"taints,omitempty"`
}

const (
	maxDPSize   = 1024
	maxWorkerID = 1<<53 - 1
	EngineAuto  = "auto"
	AllWorkers  = "*" // the dial address that gives the defaults of all workers
)

// Check returns what is wrong with the settings.
func (w *Settings) Check() error {
	switch {
	case w.KVTokens < 0:
		return fmt.Errorf("kv_tokens: must be positive, got %d", w.KVTokens)
	case w.DPSize < 0 || w.DPSize > maxDPSize:
		return fmt.Errorf("dp_size: must be between 1 and %d, got %d", maxDPSize, w.DPSize)
	case w.MaxRunning < 0 && w.MaxRunning != LimitAuto:
		return fmt.Errorf("max_running: must be positive or auto, got %d", int(w.MaxRunning))
	case !KnownEngine(w.Engine):
		return fmt.Errorf("engine: %w, got %q", ErrEngine, w.Engine)
	case w.Role != "" && !slices.Contains(engine.Roles, engine.Role(w.Role)):
		return fmt.Errorf("role: must be both, prefill, decode or backup, got %q", w.Role)
	case w.MooncakePort < 0 || w.MooncakePort > 65535:
		return fmt.Errorf("mooncake_port: must be between 1 and 65535, got %d", w.MooncakePort)
	case len(w.Taints) > nvext.MaxList:
		return fmt.Errorf("taints: must be at most %d, got %d", nvext.MaxList, len(w.Taints))
	case w.ID > maxWorkerID:
		return fmt.Errorf("id: must be at most %d, because many JSON readers round larger numbers, got %d", uint64(maxWorkerID), w.ID)
	case w.Dial == AllWorkers && w.ID != 0:
		return fmt.Errorf("id: must be unique, so worker %s cannot have one, got %d", AllWorkers, w.ID)
	case w.Dial == AllWorkers && w.DynamoInstanceID != 0:
		return fmt.Errorf("dynamo_instance_id: must be unique, so worker %s cannot have one, got %d", AllWorkers, w.DynamoInstanceID)
	}
	if err := w.KVEvents.Check(w.Dial == AllWorkers); err != nil {
		return err
	}
	if err := w.checkBackup(); err != nil {
		return err
	}
	for _, taint := range w.Taints {
		if taint == "" || len(taint) > nvext.MaxName {
			return fmt.Errorf("taints: each must have 1 to %d bytes, got %q", nvext.MaxName, taint)
		}
	}
	for _, s := range []struct{ option, word string }{
		{"priority", w.Priority}, {"thinking_budget", w.ThinkingBudget}, {"cache_salt", w.CacheSalt}, {"sessions", w.Sessions},
	} {
		if !engine.Switch(s.word).Known() {
			return fmt.Errorf("%s: must be on, off or auto, got %q", s.option, s.word)
		}
	}
	return nil
}

// checkBackup checks the options that only backups have, or cannot have.
func (w *Settings) checkBackup() error {
	switch is := w.IsBackup(); {
	case is && w.Dial == AllWorkers:
		return errors.New("role: worker * cannot be a backup")
	case is && len(w.Models) == 0:
		return errors.New("role: a backup needs models")
	case is && w.APIKey != "":
		return errors.New("api_key: a backup gets no requests of the router's own; use header Authorization")
	case !is && (w.Headers != nil || w.MatcherSetsRaw != nil || w.Model != ""):
		return errors.New("header, match and model: only a worker with role backup can have them")
	}
	for name, value := range w.Headers {
		if !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			return fmt.Errorf("header: must have a valid name and value, got the name %q", name)
		}
	}
	return nil
}

// IsBackup returns whether the worker serves only what no other one can.
func (w *Settings) IsBackup() bool { return engine.Role(w.Role) == engine.RoleBackup }

// ErrEngine says which engines there are.
var ErrEngine = fmt.Errorf("must be auto or one of %s", strings.Join(engine.Names, ", "))

// KnownEngine returns whether a name is that of an engine, or auto.
func KnownEngine(name string) bool {
	return name == "" || name == EngineAuto || engine.Known(name)
}

// KVEventsSettings say where a worker publishes the events of its KV cache. From them the
// router knows what the cache holds. Without them it knows only what it has sent there.
type KVEventsSettings struct {
	// Where the worker publishes: `auto`, `off`, a port, or an endpoint such as
	// `tcp://10.0.0.5:5557` or `ipc:///run/vllm/events`. `auto` is what the engine reports: vLLM
	// 0.32 and later do, and SGLang. A port is one of the worker's host.
	// Each further data-parallel rank publishes at the next port. Default: `auto`.
	Source string `json:"source,omitempty"`

	// Where the worker answers requests for earlier events: a port or an endpoint, as above.
	// The router asks after its start and after lost events. Default: what the engine
	// reports with `auto`, else nowhere.
	Replay string `json:"replay,omitempty"`

	// The beginning of the topics to subscribe to. Default: all topics.
	Topic string `json:"topic,omitempty"`
}

// The sources of events that are no places.
const (
	EventsAuto = "auto"
	EventsOff  = "off"
)

// Check returns what is wrong with the settings. all says that they are those of all workers.
func (k *KVEventsSettings) Check(all bool) error {
	if k == nil {
		return nil
	}
	source := cmp.Or(k.Source, EventsAuto)
	fixed := isEndpoint(source)
	switch {
	case source != EventsAuto && source != EventsOff && !fixed && PortOf(source) == 0:
		return fmt.Errorf("kv_events: must be auto, off, a port, or an endpoint such as tcp://host:5557, got %q", k.Source)
	case k.Replay != "" && !isEndpoint(k.Replay) && PortOf(k.Replay) == 0:
		return fmt.Errorf("kv_events replay: must be a port, or an endpoint such as tcp://host:5558, got %q", k.Replay)
	case all && (fixed || isEndpoint(k.Replay)):
		return fmt.Errorf("kv_events: workers cannot share an endpoint, so worker %s cannot have one, got %q", AllWorkers, cmp.Or(k.Replay, source))
	case source == EventsOff && (k.Replay != "" || k.Topic != ""):
		return errors.New("kv_events: off has no replay and no topic")
	}
	return nil
}

// isEndpoint returns whether a text is an endpoint to connect to.
func isEndpoint(s string) bool {
	if path, is := strings.CutPrefix(s, "ipc://"); is {
		return path != ""
	}
	addr, is := strings.CutPrefix(s, "tcp://")
	host, port, err := net.SplitHostPort(addr)
	return is && err == nil && host != "" && host != "*" && PortOf(port) > 0
}

// PortOf returns the number of a port, 0 for another text.
func PortOf(s string) int {
	port, err := strconv.Atoi(s)
	if err != nil || port < 1 || port > 1<<16-1 {
		return 0
	}
	return port
}

// RequestLimit is the most requests that a worker has at a time: a positive number, or
// LimitAuto. The zero value is no limit. In JSON it is a number or "auto".
type RequestLimit int

// LimitAuto is the limit that the engine reports, and no limit while it reports none.
const LimitAuto RequestLimit = -1

const limitAuto = "auto"

func (l RequestLimit) String() string {
	if l == LimitAuto {
		return limitAuto
	}
	return strconv.Itoa(int(l))
}

// ParseRequestLimit parses a positive number or auto.
func ParseRequestLimit(s string) (l RequestLimit, ok bool) {
	if s == limitAuto {
		return LimitAuto, true
	}
	n, err := strconv.Atoi(s)
	return RequestLimit(n), err == nil && n > 0
}

func (l RequestLimit) MarshalJSON() ([]byte, error) {
	if l == LimitAuto {
		return []byte(`"` + limitAuto + `"`), nil
	}
	return strconv.AppendInt(nil, int64(l), 10), nil
}

func (l *RequestLimit) UnmarshalJSON(b []byte) error {
	if string(b) == `"`+limitAuto+`"` {
		*l = LimitAuto
		return nil
	}
	var n int
	if err := json.Unmarshal(b, &n); err != nil || n < 0 {
		return fmt.Errorf(`max_running: must be a positive whole number or "auto", got %s`, b)
	}
	*l = RequestLimit(n)
	return nil
}
