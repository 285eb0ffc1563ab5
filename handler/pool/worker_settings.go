package pool

import (
	"fmt"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// WorkerSettings are what the operator configures of one engine.
type WorkerSettings struct {
	// The worker's dial address, as among the upstreams, or `*` for the
	// defaults of all.
	Dial string `json:"dial"`

	// The worker's id, unique in its pool. Default: derived from the address.
	ID uint64 `json:"id,omitempty"`

	// The type of this engine, see the handler's `engine`. Default: that one.
	Engine string `json:"engine,omitempty"`

	// The number of data-parallel ranks that the engine has behind its address,
	// each with a KV cache of its own. Each request goes to one of them. vLLM reads
	// the rank in the header `X-Data-Parallel-Rank`, SGLang there and in the body's
	// `routed_dp_rank`. Engines of other types have one rank, except those of the type
	// `other`. Default: what the engine reports, else 1.
	DPSize int `json:"dp_size,omitempty"`

	// The most inference requests that the worker has at a time. Further requests
	// go to other workers, and wait if all workers are full. A session whose worker
	// is full has this turn elsewhere and stays bound. Default: no limit.
	MaxRunning int `json:"max_running,omitempty"`

	// The number of tokens that the engine's KV cache has room for, of each
	// rank if it has several. Default: what the engine reports, else 262144.
	KVTokens int64 `json:"kv_tokens,omitempty"`

	// The names of the models that the engine serves. Requests for other
	// models go to other workers. If all workers have such a list and none
	// names the model, the request is answered with 404. Default: the router
	// asks the engine every four seconds.
	Models []string `json:"models,omitempty"`

	// The key that the router sends to the engine with requests of its own,
	// as `Authorization: Bearer`. Clients' requests go as they are. May have
	// placeholders. Default: none.
	APIKey string `json:"api_key,omitempty"`

	// Whether the engine orders requests by their priority: `on`, `off` or `auto`.
	// The router then sends it the priority of `nvext.agent_hints.priority`, in the
	// engine's own polarity. Other engines may refuse requests that have one. Default:
	// `auto`, which is what the engine reports (SGLang), else off.
	Priority string `json:"priority,omitempty"`

	// Whether the engine takes a limit of reasoning tokens: `on`, `off` or `auto`. The
	// router then sends it `nvext.max_thinking_tokens`. Other engines may refuse
	// requests that have one. Default: `auto`, which is what the engine reports
	// (SGLang), on for llama.cpp, and else off.
	ThinkingBudget string `json:"thinking_budget,omitempty"`

	// Whether the engine keeps the caches of requests with different salts
	// apart, in each API in which it is given one: `on`, `off` or `auto`. It
	// matters if `cache_salt` is enforced. Default: `auto`, as is known of
	// its type and version.
	CacheSalt string `json:"cache_salt,omitempty"`

	// The instance behind a Dynamo frontend to which requests go that are pinned
	// to this worker: a number in quotes, because Caddy does not keep all digits of
	// other numbers. Default: none, and the frontend chooses.
	DynamoInstanceID uint64 `json:"dynamo_instance_id,omitempty,string"`

	// Whether the worker is being drained: it gets no new requests, and what
	// runs on it ends there. Sessions bound to it move with their next turn.
	// Where no other worker is left to serve a request, draining is ignored.
	// The admin API drains, too. Such a drain outlives reloads, whatever the
	// configuration says, until the admin API or a restart ends it. Default: `false`.
	Drain bool `json:"drain,omitempty"`

	// Words by which clients that are trusted with `overrides` require or prefer
	// workers (`nvext.routing_constraints`), at most 64 of 256 bytes each.
	// Default: none.
	Taints []string `json:"taints,omitempty"`

	// What the worker does of a request: `both` prefill and decode. There is no
	// other role yet. Default: `both`.
	Role string `json:"role,omitempty"`
}

const (
	maxDPSize   = 1024
	maxWorkerID = 1<<53 - 1
	EngineAuto  = "auto"
	roleBoth    = "both" // the only value of workerSettings.Role
	AllWorkers  = "*"    // the dial address that gives the defaults of all workers
)

// check returns what is wrong with the settings.
func (w *WorkerSettings) check() error {
	switch {
	case w.KVTokens < 0:
		return fmt.Errorf("kv_tokens must not be negative, got %d", w.KVTokens)
	case w.DPSize < 0 || w.DPSize > maxDPSize:
		return fmt.Errorf("dp_size must be between 1 and %d, got %d", maxDPSize, w.DPSize)
	case w.MaxRunning < 0:
		return fmt.Errorf("max_running must not be negative, got %d", w.MaxRunning)
	case !knownEngine(w.Engine):
		return fmt.Errorf("engine: %w, got %q", errEngine, w.Engine)
	case w.Role == "prefill" || w.Role == "decode":
		return fmt.Errorf("role %s: prefill and decode cannot be split up between workers, the role must be %s", w.Role, roleBoth)
	case w.Role != "" && w.Role != roleBoth:
		return fmt.Errorf("role: must be %s, got %q", roleBoth, w.Role)
	case len(w.Taints) > nvext.MaxList:
		return fmt.Errorf("taints: at most %d, got %d", nvext.MaxList, len(w.Taints))
	case w.ID > maxWorkerID:
		return fmt.Errorf("id must be at most %d, for JSON's numbers are rounded above, got %d", uint64(maxWorkerID), w.ID)
	case w.Dial == AllWorkers && w.ID != 0:
		return fmt.Errorf("id %d cannot be that of all workers", w.ID)
	case w.Dial == AllWorkers && w.DynamoInstanceID != 0:
		return fmt.Errorf("dynamo_instance_id: %d cannot be that of all workers", w.DynamoInstanceID)
	}
	for _, taint := range w.Taints {
		if taint == "" || len(taint) > nvext.MaxName {
			return fmt.Errorf("taints: must have 1 to %d bytes, got %q", nvext.MaxName, taint)
		}
	}
	for _, s := range []struct{ option, word string }{
		{"priority", w.Priority}, {"thinking_budget", w.ThinkingBudget}, {"cache_salt", w.CacheSalt},
	} {
		if !engine.Switch(s.word).Known() {
			return fmt.Errorf("%s: must be on, off or auto, got %q", s.option, s.word)
		}
	}
	return nil
}

var errEngine = fmt.Errorf("must be auto or one of %s", strings.Join(engine.Names, ", "))

func knownEngine(name string) bool {
	return name == "" || name == EngineAuto || engine.Known(name)
}

// merge returns the settings with those of o in place of what was not set. The error
// names the options that both set to different values.
func (w WorkerSettings) merge(o WorkerSettings) (WorkerSettings, error) {
	err := mergeOptions(&w, o, "json", "worker "+o.Dial+" ")
	return w, err
}
