package engine

import (
	"cmp"
	"io"
	"maps"
	"net/http"
	"time"
)

// Flavour is the server that an engine looks like.
type Flavour string

// The flavours.
const (
	VLLM   Flavour = "vllm"
	SGLang Flavour = "sglang"
	// OldSGLang has /get_server_info only.
	OldSGLang Flavour = "sglang-old"
	TRTLLM    Flavour = "trtllm"
	LlamaCpp  Flavour = "llamacpp"
	// Dynamo is a Dynamo frontend with one worker.
	Dynamo Flavour = "dynamo"
)

// owners are whom the list of models names.
var owners = map[Flavour]string{
	VLLM: "vllm", SGLang: "sglang", OldSGLang: "sglang", TRTLLM: "tensorrt_llm", LlamaCpp: "llamacpp", Dynamo: "nvidia",
}

// flavours are what is answered by method and path, beside inference.
var flavours map[Flavour]map[string]func(*exchange)

func init() { // some of these look at the flavour
	flavours = map[Flavour]map[string]func(*exchange){
		VLLM: {
			"GET /health": (*exchange).fine, "GET /version": (*exchange).version,
			"GET /v1/models": (*exchange).models, "GET /metrics": (*exchange).metrics,
			"POST /tokenize": (*exchange).tokenize, "GET /kv_event_sources": (*exchange).eventSources, "POST " + ResetPath: (*exchange).resetPrefixCache,
			"POST " + SleepPath: (*exchange).sleep, "POST " + WakePath: (*exchange).wakeUp, "POST /collective_rpc": (*exchange).fine,
			"POST /v1/chat/completions/render": (*exchange).render, "POST /v1/completions/render": (*exchange).render,
		},
		SGLang: {
			"GET /health": (*exchange).fine, "GET /v1/models": (*exchange).models,
			"GET /server_info": (*exchange).serverInfo, "GET /get_server_info": (*exchange).serverInfo,
			"POST /tokenize": (*exchange).tokenize, "POST /v1/tokenize": (*exchange).tokenize,
			"POST " + FlushPath: (*exchange).flushCache,
			"POST " + OpenPath:  (*exchange).openSession, "POST " + ClosePath: (*exchange).closeSession, "GET /v1/loads": (*exchange).loads,
			"POST " + AbortPath: (*exchange).abort,
		},
		OldSGLang: {
			"GET /health": (*exchange).fine, "GET /v1/models": (*exchange).models, "GET /get_server_info": (*exchange).serverInfo,
			"POST " + FlushPath: (*exchange).flushCache,
		},
		TRTLLM: {
			"GET /health": (*exchange).fine, "GET /version": (*exchange).version, "GET /v1/models": (*exchange).models,
			"GET /server_info": (*exchange).handover, "GET /metrics": (*exchange).drained,
		},
		LlamaCpp: {
			"GET /health": (*exchange).ok, "GET /v1/models": (*exchange).models, "GET /props": (*exchange).props,
			"POST /apply-template": (*exchange).applyTemplate, "POST /tokenize": (*exchange).tokenize,
		},
		Dynamo: {
			"GET /health": (*exchange).instances, "GET /live": (*exchange).ok, "GET /v1/models": (*exchange).models, "POST /tokenize": (*exchange).tokenize,
			"GET /metrics": (*exchange).inflight,
		},
	}
}

func (x *exchange) fine() { x.header(http.StatusOK, "text/plain; charset=utf-8") }

func (x *exchange) ok() { x.value(map[string]string{"status": "ok"}) }

func (x *exchange) version() {
	x.value(map[string]string{"version": cmp.Or(x.engine.cfg.Version, version)})
}

// serverInfo answers as an SGLang does, with the fields that matter here.
func (x *exchange) serverInfo() {
	cfg, told := &x.engine.cfg, cmp.Or(x.engine.cfg.Version, version)
	if cfg.Flavour == OldSGLang {
		told = oldVersion
	}
	tokens := cfg.Blocks * cfg.BlockSize
	states := make([]any, cfg.Ranks)
	for i := range states {
		states[i] = object{
			"memory_usage":                          object{"token_capacity": tokens, "kvcache": 1.5},
			"effective_max_running_requests_per_dp": cfg.MaxRunning,
		}
	}
	info := object{
		"model_path": cfg.Model, "context_length": nil, "page_size": cfg.BlockSize, "dp_size": cfg.Ranks,
		"max_running_requests": nil, "disable_radix_cache": false, "random_seed": x.life.started.UnixNano() % 1e9,
		"max_total_num_tokens": tokens, "internal_states": states, "version": told,
	}
	if cfg.Flavour == SGLang {
		info["enable_streaming_session"] = cfg.StreamingSessions
		info["disaggregation_mode"], info["disaggregation_bootstrap_port"] = "null", 8998
		if t := cfg.Transfer; t != nil {
			info["disaggregation_mode"], info["disaggregation_transfer_backend"] = t.Role, "nixl"
			_, info["disaggregation_bootstrap_port"] = hostPort(x.engine.SideAddr())
		}
		if kv := x.engine.describeEvents(); kv != nil {
			info["kv_events"] = kv
		}
	}
	maps.Copy(info, cfg.ServerInfo)
	x.value(info)
}

// handover answers as a TensorRT-LLM does that transfers no prefill.
func (x *exchange) handover() { x.value(object{"disaggregated_params": nil}) }

// drained answers as a TensorRT-LLM does, which gives its statistics away once.
func (x *exchange) drained() {
	x.value([]any{object{"iter": x.life.drains.Add(1), "kvCacheStats": map[string]int{"maxNumBlocks": x.engine.cfg.Blocks}}})
}

// props answers as a llama.cpp does, whose slots have room for one context each.
func (x *exchange) props() {
	cfg := &x.engine.cfg
	x.value(object{
		"default_generation_settings": object{"id": 0, "n_ctx": cfg.MaxModelLen, "params": object{}},
		"total_slots":                 cfg.MaxRunning, "model_path": cfg.Model, "build_info": "b" + version, "is_sleeping": false,
	})
}

// inflight answers as a Dynamo frontend does that is asked for its metrics.
func (x *exchange) inflight() {
	x.header(http.StatusOK, "text/plain; charset=utf-8")
	_, _ = io.WriteString(x.w, "# TYPE dynamo_frontend_inflight_requests gauge\ndynamo_frontend_inflight_requests{model=\"m\"} 0\n")
}

// instances answers as a Dynamo frontend does.
func (x *exchange) instances() {
	x.value(object{
		"status": "healthy", "message": "Service is healthy",
		"endpoints": []string{"dyn://dynamo.backend.generate"},
		"instances": []any{object{
			"namespace": "dynamo", "component": "backend", "endpoint": "generate",
			"instance_id": x.life.started.Truncate(time.Second).Unix(), "transport": map[string]string{"tcp": "127.0.0.1:1"},
		}},
	})
}
