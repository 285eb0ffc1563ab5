package engine

import (
	"cmp"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/tidwall/gjson"
)

// SGLang is SGLang's server.
const SGLang = "sglang"

// sglang isolates the prompts of /generate by salt, too. A prompt enters its cache when its
// prefill is over.
var sglang = kind{
	name: SGLang, owner: "sglang", shows: (*server).isSGLang, read: (*server).readSGLang,
	takesRank: func(Info, string) bool { return true },
	paths:     []string{"/vertex_generate", "/generate_from_file", "/encode"},
	// not /init_weights_update_group, in which each engine has a rank of its own
	all: []string{
		"/abort_request", "/pause_generation", "/continue_generation", "/flush_cache",
		"/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter",
		"/set_lora", "/merge_lora_weights", "/unmerge_lora_weights",
		"/update_weights_from_disk", "/update_weights_from_distributed", "/update_weights_from_tensor",
		"/update_weights_from_ipc", "/update_weight_version", "/destroy_weights_update_group",
		"/release_memory_occupation", "/resume_memory_occupation", "/start_profile", "/stop_profile",
		"/start_expert_distribution_record", "/stop_expert_distribution_record", "/dump_expert_distribution_record",
		"/clear_hicache_storage_backend", "/hicache/storage-backend/clear",
		"/add_external_corpus", "/remove_external_corpus",
		"/configure_logging", "/set_internal_state", "/set_trace_level", "/freeze_gc", "/slow_down",
	},
	salts: salted{
		sure: []string{api.NameChat, api.NameCompletions, api.NameResponses, api.NameGenerate}, since: []int{0, 5, 4},
		also: []string{Invocations},
	},
	tokens: map[string]string{api.NameChat: "input_ids", api.NameGenerate: "input_ids"},
	steers: append(slices.Concat(rankSteering, ownPhases(nameHost, namePort, nameRoom)),
		steering{member: namePriority, grant: nvext.Priorities, heeds: (*Engine).sglangOrders},
		steering{member: nameRetention, grant: nvext.Priorities, heeds: (*Engine).sglangEvicts}),
	phases:       sglangPhases,
	always:       (*adapter).sglangAlways,
	adapt:        (*adapter).toSGLang,
	sessions:     []string{api.NameGenerate},
	someSessions: []string{api.NameChat, api.NameCompletions},
	tokenize:     (*Question).askSGLang,
	continues:    []string{api.NameChat},
	continuing:   []steadyMember{{"continue_final_message", "true"}},
	textMember:   "prompt", specialMember: "add_special_tokens",
	loads:           sglangLoads,
	omitsZeroCached: true,
	hitsLate:        true,
	fitsCache:       true,
}

const nameRetention, nameExtraKey = "retention_seconds", "extra_key"

// sglangInfo returns /server_info, or /get_server_info of older versions.
func (s *server) sglangInfo() gjson.Result {
	for _, path := range []string{pathServerInfo, "/get_server_info"} {
		info := s.json(path)
		if info.Get("max_total_num_tokens").Exists() || info.Get("internal_states").IsArray() {
			return info
		}
	}
	return gjson.Result{}
}

func (s *server) isSGLang() bool { return s.sglangInfo().IsObject() }

// readSGLang reads the list of models and /server_info. Numbers are those of one
// rank: of the first, if they differ.
func (s *server) readSGLang(to *Info) {
	info := s.sglangInfo()
	first := info.Get("internal_states.0")
	yes := func(name string) bool { return info.Get(name).Type == gjson.True }
	to.ContextTokens = cmp.Or(s.contextTokens(), count(info.Get("context_length")))
	to.Version = readVersion(info)
	to.KVTokens = cmp.Or(count(info.Get("max_total_num_tokens")), count(first.Get("memory_usage.token_capacity")))
	to.BlockSize = within(count(info.Get("page_size")), maxBlockSize)
	to.DPSize = within(count(info.Get("dp_size")), maxRanks)
	all := count(info.Get("max_running_requests")) // of all ranks
	perRank := cmp.Or(count(first.Get("effective_max_running_requests_per_dp")), all/int64(max(1, to.DPSize)))
	to.MaxRunning = within(perRank, maxCount)
	to.StepTokens = cmp.Or(count(info.Get("chunked_prefill_size")), count(info.Get("max_prefill_tokens"))) // -1: no chunks
	to.NoPrefixCache = yes("disable_radix_cache")
	to.Priority = yes("enable_priority_scheduling")
	to.LowFirst = to.Priority && yes("schedule_low_priority_values_first")
	// SGLang may refuse priorities that it does not schedule by.
	to.PriorityEviction = info.Get("radix_eviction_policy").Str == "priority" &&
		(to.Priority || !yes("abort_on_priority_when_disabled"))
	to.StrictThinking = yes("enable_strict_thinking") && info.Get("reasoning_parser").Str != ""
	// Streaming sessions are an option. Versions that lack it open sessions of another
	// kind, whose turns do not continue each other.
	if sessions := info.Get("enable_streaming_session"); sessions.Exists() {
		to.NoSessions = sessions.Type == gjson.False
	} else {
		to.NoSessions = to.Version != "" && before(to.Version, 0, 5, 9)
	}
	readSGLangEvents(info, &to.KVEvents)
	readSGLangRole(info, to)
	// SGLang does not report when it started. It draws a seed at its start, and the
	// cache's size depends on the free memory at that time.
	if seed := info.Get("random_seed"); seed.Type == gjson.Number {
		to.BootID = cleaned(seed.Raw + "/" + info.Get("max_total_num_tokens").Raw)
	}
}

// readSGLangEvents reads the member kv_events of /server_info.
func readSGLangEvents(info gjson.Result, to *KVEvents) {
	e := info.Get("kv_events")
	at := func(name string) string {
		port := within(count(e.Get(name+"_port_base")), maxPort)
		if port == 0 {
			return ""
		}
		return "tcp://" + net.JoinHostPort(cmp.Or(endpointIn(e.Get(name+"_host")), "*"), strconv.Itoa(port))
	}
	if to.Endpoint = at("endpoint"); to.Endpoint == "" || e.Get("publisher").Str != "zmq" {
		*to = KVEvents{}
		return
	}
	to.Replay, to.Topic = at("replay_endpoint"), endpointIn(e.Get("topic"))
	to.Listens = gjson.Get(info.Get("kv_events_config").Str, "bind").Bool()
	to.Publishers = max(1, within(count(e.Get("dp_size")), maxRanks))
}

// sglangAlways sets the rank in the body, too: version and path decide whether SGLang
// heeds the header or the body. In newer versions the older name is an alias: the
// client's value must not win. It also scopes the client's sessions.
func (f *adapter) sglangAlways() {
	if f.Body == nil {
		return
	}
	if f.Ranks > 1 {
		if f.Info.Version == "" || before(f.Info.Version, 0, 5, 10) {
			f.integer(nameOldRank, int64(f.Rank))
		} else {
			f.Body.Cut(nameOldRank)
		}
		f.integer(nameRank, int64(f.Rank))
	}
	f.sglangSessions()
}

// toSGLang sets SGLang's own members. A higher priority is earlier, unless
// --schedule-low-priority-values-first reverses that. SGLang heeds priorities with
// --enable-priority-scheduling; its cache does with --radix-eviction-policy
// priority. A limit of reasoning needs --enable-strict-thinking.
func (f *adapter) toSGLang() {
	f.extraKey()
	own := f.on(api.NameChat, api.NameCompletions, api.NameGenerate)
	if f.takes(Priority, own && f.sglangOrders()) {
		n := int64(f.Ext.AgentHints.Priority.Value)
		if f.Info.LowFirst {
			n = -n
		}
		f.integer(namePriority, n)
	}
	if f.takes(CacheControl, own && f.sglangEvicts()) {
		f.integer(nameRetention, int64(f.Ext.CacheTTL.Value/time.Second))
	}
	f.sglangThinking(own)
}

// sglangEvicts returns whether SGLang's cache evicts low priorities first.
func (e *Engine) sglangEvicts() bool { return e.Info.PriorityEviction && e.Settings.Priority != Off }

// sglangOrders returns whether SGLang heeds priorities, in its cache or its queue.
func (e *Engine) sglangOrders() bool {
	return e.sglangEvicts() || e.Settings.Priority.or(e.Info.Priority)
}

// extraKey puts the salt before SGLang's other member that isolates caches. SGLang
// joins the two: a client could otherwise turn its tenant's salt into another's.
// Older versions of /generate know this member only, so there it is always set.
func (f *adapter) extraKey() {
	salt, own := short(f.Ext.Salt(""), 0), f.Body.Value(nameExtraKey)
	switch {
	case salt == "" || isNull(own) && !f.on(api.NameGenerate):
	case isNull(own):
		f.text(nameExtraKey, salt)
	default:
		f.text(nameExtraKey, salt+digest(own))
	}
}

func (f *adapter) sglangThinking(own bool) {
	if !own || f.requested&MaxThinkingTokens == 0 || !f.Settings.ThinkingBudget.or(f.Info.StrictThinking) {
		return
	}
	in, ok := f.Body, true
	if f.on(api.NameGenerate) {
		in, ok = f.Body.Object(nameSampling)
	}
	if !ok {
		return
	}
	if params, ok := in.Object("custom_params"); f.takes(MaxThinkingTokens, ok) {
		params.Set("thinking_budget", strconv.AppendUint(nil, uint64(f.Ext.MaxThinkingTokens.Value), 10))
	}
}

// askSGLang asks SGLang's tokenizer. Versions before 2026 refuse conversations.
// Newer ones use only the members here
// (python/sglang/srt/entrypoints/openai/serving_tokenize.py).
func (q *Question) askSGLang(post Post) []byte {
	switch {
	case q.says("chat_template", "reasoning", "truncate_prompt_tokens", "suffix"):
		return nil
	case q.API == api.NameChat:
		return tokenize(post, q.only("model", "messages", "tools", "tool_choice", "reasoning_effort",
			"continue_final_message", "chat_template_kwargs"))
	}
	o := q.only("model")
	o.Raw("prompt", q.Text)
	return tokenize(post, o)
}
