package engine

import (
	"bytes"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/tidwall/gjson"
)

// VLLM is vLLM's OpenAI server.
const VLLM = "vllm"

// vllm takes a salt in messages and pooling in newer versions only, and loses it for
// embeddings in chunks.
var vllm = kind{
	name: VLLM, owner: "vllm", shows: (*server).isVLLM, read: (*server).readVLLM,
	takesRank: vllmTakesRank,
	// not /init_weight_transfer_engine, in which each engine has a rank of its own
	all: []string{
		"/load_lora_adapter", "/unload_lora_adapter", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
		"/sleep", "/wake_up", "/pause", "/resume", "/pause_generation", "/resume_generation", "/abort_requests",
		"/update_weights", "/start_weight_update", "/finish_weight_update", "/collective_rpc",
		"/start_profile", "/stop_profile",
	},
	salts: salted{
		sure:  []string{api.NameChat, api.NameCompletions, api.NameResponses, api.NameTokens},
		since: []int{0, 10, 1}, most: maxVLLMSalt,
		also: []string{
			api.NameMessages, api.NameEmbeddings, api.NameRerank, api.NameScore, api.NameClassify, api.NamePooling, Invocations,
		},
	},
	tokens: map[string]string{api.NameTokens: "token_ids"},
	steers: slices.Concat(prioritySteering, ownPhases(nameTransfer), []steering{ // vLLM passes these on to its scheduler
		{member: nameTransfer, grant: nvext.Pins, in: []string{"vllm_xargs"}},
		{member: nameTransfer, grant: nvext.Pins, in: []string{nameSampling, "extra_args"}},
	}),
	phases:   vllmPhases,
	namesAll: true, namesSessions: true,
	adapt:      (*adapter).toVLLM,
	tokenize:   (*Question).askVLLM,
	continues:  []string{api.NameChat},
	continuing: []steadyMember{{"continue_final_message", "true"}, {"add_generation_prompt", "false"}},
	textMember: "prompt", specialMember: "add_special_tokens",
	exact: []string{api.NameChat, api.NameCompletions},
	loads: vllmLoads,
}

// maxVLLMSalt is the longest salt that vLLM accepts, in characters.
const maxVLLMSalt = 1024

// vllmTakesRank returns whether vLLM heeds the header for the rank. It does from 0.11 on,
// in some APIs never (vllm/entrypoints: openai/responses/serving.py,
// pooling/base/serving.py), and for token ids from 0.32 on.
func vllmTakesRank(t Info, name string) bool {
	switch name {
	case api.NameResponses, api.NameEmbeddings, api.NameRerank, api.NameScore, api.NameClassify, api.NamePooling:
		return false
	case api.NameTokens:
		return !before(t.Version, 0, 32, 0)
	}
	return !before(t.Version, 0, 11, 0)
}

// isVLLM returns whether the server has vLLM's metrics. Behind an API key, only
// these and the version are visible.
func (s *server) isVLLM() bool {
	if s.version() == "" {
		return false
	}
	status, page := s.ask(pathMetrics)
	return status == 200 && bytes.Contains(page, []byte("\nvllm:"))
}

// readVLLM reads /version, the list of models, and the metrics. The metrics name
// each data-parallel rank as an engine.
func (s *server) readVLLM(info *Info) {
	info.ContextTokens = s.contextTokens()
	info.Version = s.version()
	hasMetrics := false
	if status, page := s.ask(pathMetrics); status == 200 {
		hasMetrics = readVLLMMetrics(page, info)
	}
	if !hasMetrics { // only development servers have the page
		info.Asleep = s.json(pathSleep).Get("is_sleeping").Type == gjson.True
	}
	s.readVLLMEvents(&info.KVEvents)
	if info.KVTokens < info.ContextTokens/leastContexts {
		info.KVTokens = 0
	}
}

// A credible cache has room for this many blocks and this part of the longest
// context: vLLM does not start with less.
const leastBlocks, leastContexts = 16, 8

// pathSleep says whether a vLLM sleeps.
const pathSleep = "/is_sleeping"

// readVLLMMetrics reads vllm:cache_config_info, which each rank has, and
// process_start_time_seconds, which is missing if API servers share a page. It returns whether the
// page says that the engine sleeps, or not: older versions do not.
func readVLLMMetrics(page []byte, info *Info) (tellsSleep bool) {
	const start, config, sleep = "process_start_time_seconds", "vllm:cache_config_info", "vllm:engine_sleep_state"
	ranks := make(map[string]bool)
	var caches []sample
	for _, s := range samplesOf(page, start, config, sleep) {
		switch {
		case s.name == sleep: // at level 0, which only holds requests, no state is 1
			tellsSleep = tellsSleep || s.value == 1
			info.Asleep = info.Asleep || s.value == 1 && s.labels["sleep_state"] != "awake"
			info.Discarded = info.Discarded || s.value == 1 && s.labels["sleep_state"] == "discard_all"
		case s.name == config:
			ranks[s.labels["engine"]] = true
			caches = append(caches, s)
		case s.value > 0 && s.value < maxCount:
			info.Started = time.UnixMilli(int64(s.value * 1000))
			info.BootID = strconv.FormatInt(info.Started.UnixMilli(), 10)
		}
	}
	for i := range caches {
		info.addVLLMCache(&caches[i], len(ranks))
	}
	info.DPSize = ranksOf(ranks)
	return tellsSleep
}

// addVLLMCache records the cache of one of some ranks. The smallest one counts. num_gpu_blocks
// is the sum of all ranks on the page (vllm/v1/engine/core_client.py).
func (t *Info) addVLLMCache(s *sample, ranks int) {
	size := s.count("block_size")
	tokens := s.count("kv_cache_size_tokens")
	if tokens == 0 { // older versions have the number of blocks only
		tokens = s.count("num_gpu_blocks") / int64(ranks) * int64(within(size, maxBlockSize))
	}
	if tokens < leastBlocks*max(size, 1) {
		tokens = 0
	}
	if tokens > 0 && (t.KVTokens == 0 || tokens < t.KVTokens) {
		t.KVTokens = tokens
	}
	t.BlockSize = within(size, maxBlockSize)
	t.NoPrefixCache = s.labels["enable_prefix_caching"] == "False"
}

// ranksOf returns the number of ranks with these names. It returns 0 if several
// ranks do not count from 0: they are part of a larger set, and the router cannot
// address them.
func ranksOf(names map[string]bool) int {
	for i := range len(names) {
		if len(names) > 1 && !names[strconv.Itoa(i)] {
			return 0
		}
	}
	return len(names)
}

// pathKVEvents names the publishers of vLLM 0.32 and later.
const pathKVEvents = "/kv_event_sources"

// sourcesByRank reads {"0": {"endpoint": ..., "replay_endpoint": ..., "topic": ...}, ...}.
func (s *server) sourcesByRank() map[int]gjson.Result {
	of := make(map[int]gjson.Result)
	s.json(pathKVEvents).ForEach(func(key, one gjson.Result) bool {
		if rank, err := strconv.Atoi(key.Str); err == nil && rank >= 0 && rank < maxRanks && one.IsObject() {
			of[rank] = one
		}
		return true
	})
	return of
}

// readVLLMEvents reads the publishers. It ignores them if the ports of their ranks do not
// follow each other.
func (s *server) readVLLMEvents(to *KVEvents) {
	of := s.sourcesByRank()
	if len(of) == 0 {
		return
	}
	lowest := maxRanks
	for rank := range of {
		lowest = min(lowest, rank)
	}
	if lowest > 0 && len(of) > 1 {
		return // a part of a larger set, which the router cannot address
	}
	found := KVEvents{
		Endpoint: endpointIn(of[lowest].Get("endpoint")), Replay: endpointIn(of[lowest].Get("replay_endpoint")),
		Topic: endpointIn(of[lowest].Get("topic")), Publishers: len(of),
	}
	for rank, one := range of {
		if PortAfter(found.Endpoint, rank-lowest) != one.Get("endpoint").Str {
			return
		}
	}
	if found.Endpoint != "" {
		*to = found
	}
}

// toVLLM sets vLLM's own members. A lower priority is earlier. vLLM refuses
// priorities without --scheduling-policy priority, and thinking_token_budget if
// it does not know how the model's reasoning ends. It reports neither setting.
func (f *adapter) toVLLM() {
	heeds := f.Settings.Priority == On
	if f.takes(Priority, heeds && f.on(api.NameChat, api.NameCompletions, api.NameResponses, api.NameTokens)) {
		f.integer(namePriority, -int64(f.Ext.AgentHints.Priority.Value))
	}
	budget := int64(f.Ext.MaxThinkingTokens.Value)
	switch takes := f.Settings.ThinkingBudget == On; {
	case f.takes(MaxThinkingTokens, takes && f.on(api.NameChat, api.NameCompletions)):
		f.integer(nameBudget, budget)
	case takes && f.on(api.NameTokens):
		if in, ok := f.Body.Object(nameSampling); f.takes(MaxThinkingTokens, ok) {
			in.Set(nameBudget, strconv.AppendInt(nil, budget, 10))
		}
	}
}

// askVLLM posts the whole request to /render below the API's path. That path
// handles every member, but exists only with --enable-scale-out. Otherwise
// askVLLM uses the tokenizer.
func (q *Question) askVLLM(post Post) []byte {
	path := "/v1/completions/render" // answers with a list of one
	if q.API == api.NameChat {
		path = "/v1/chat/completions/render"
	}
	status, answer := post(path, q.whole())
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed:
		return q.askTokenizer(post)
	}
	return tokensIn(status, answer, "token_ids")
}

// askTokenizer asks vLLM's tokenizer, or one of the same form, which knows the
// usual members only (vllm/entrypoints/serve/tokenize/protocol.py). Other members
// that change the prompt rule it out.
func (q *Question) askTokenizer(post Post) []byte {
	switch {
	case q.says("reasoning_effort", "reasoning", "documents", "truncate_prompt_tokens", "suffix"):
		return nil
	case q.API == api.NameChat:
		return tokenize(post, q.only("model", "messages", "tools", "add_generation_prompt",
			"continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs"))
	}
	return tokenize(post, q.only("model", "prompt", "add_special_tokens"))
}

// WakeCalls returns how the engine is woken. After a sleep of level 2 it must load its weights again.
func (e *Engine) WakeCalls() []Call {
	if e.Info.Discarded {
		return []Call{
			{"/wake_up?tags=weights", nil},
			{"/collective_rpc", []byte(`{"method":"reload_weights"}`)},
			{"/wake_up?tags=kv_cache", nil},
		}
	}
	return []Call{{"/wake_up", nil}}
}
