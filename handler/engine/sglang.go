package engine

import (
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/tidwall/gjson"
)

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
	to.ContextTokens = s.contextTokens()
	to.Version = readVersion(info)
	to.KVTokens = count(info.Get("max_total_num_tokens"))
	orDefault(&to.KVTokens, count(first.Get("memory_usage.token_capacity")))
	to.BlockSize = within(count(info.Get("page_size")), maxBlockSize)
	to.DPSize = within(count(info.Get("dp_size")), maxRanks)
	orDefault(&to.ContextTokens, count(info.Get("context_length")))
	running := count(first.Get("effective_max_running_requests_per_dp"))
	orDefault(&running, count(info.Get("max_running_requests")))
	to.MaxRunning = within(running, maxCount)
	to.NoPrefixCache = yes("disable_radix_cache")
	to.Priority = yes("enable_priority_scheduling")
	to.LowFirst = to.Priority && yes("schedule_low_priority_values_first")
	// SGLang may refuse priorities that it does not schedule by.
	to.PriorityEviction = info.Get("radix_eviction_policy").Str == "priority" && (to.Priority || !yes("abort_on_priority_when_disabled"))
	to.StrictThinking = yes("enable_strict_thinking") && info.Get("reasoning_parser").Str != ""
	// SGLang does not report when it started. It draws a seed at its start, and the
	// cache's size depends on the free memory at that time.
	if seed := info.Get("random_seed"); seed.Type == gjson.Number {
		to.Life = cleaned(seed.Raw + "/" + info.Get("max_total_num_tokens").Raw)
	}
}

// toSGLang sets SGLang's own members. A higher priority is earlier, unless
// --schedule-low-priority-values-first reverses that. SGLang heeds priorities with
// --enable-priority-scheduling; its cache does with --radix-eviction-policy
// priority. A limit of reasoning needs --enable-strict-thinking.
func (f *fit) toSGLang() {
	f.sessionParams()
	own := f.on(apiChat, apiCompletions, apiGenerate)
	evicts := f.evicts()
	if f.takes(Priority, own && (evicts || f.Settings.Priority.or(f.Info.Priority))) {
		n := int64(f.Ext.AgentHints.Priority.Value)
		if f.Info.LowFirst {
			n = -n
		}
		f.integer(namePriority, n)
	}
	if f.takes(CacheControl, own && evicts) {
		f.integer(nameRetention, int64(f.Ext.CacheTTL.Value/time.Second))
	}
	f.sglangThinking(own)
}

// sglangRank sets the rank in the body, too: version and path decide whether
// SGLang heeds the header or the body. In newer versions the older name is an
// alias: the client's value must not win.
func (f *fit) sglangRank() {
	if f.Ranks < 2 || f.Body == nil {
		return
	}
	if f.Info.Version == "" || before(f.Info.Version, 0, 5, 10) {
		f.integer(nameOldRank, int64(f.Rank))
	} else {
		f.Body.Cut(nameOldRank)
	}
	f.integer(nameRank, int64(f.Rank))
}

// evicts returns whether SGLang's cache evicts low priorities first.
func (f *fit) evicts() bool { return f.Info.PriorityEviction && f.Settings.Priority != Off }

func (f *fit) sglangThinking(own bool) {
	if !own || f.said&MaxThinkingTokens == 0 || !f.Settings.ThinkingBudget.or(f.Info.StrictThinking) {
		return
	}
	all, ok := []*api.Editor{f.Body}, true
	if f.on(apiGenerate) {
		all, ok = f.sampling()
	}
	for _, in := range all {
		params, isObject := in.Object("custom_params")
		if ok = ok && isObject; isObject {
			params.Set("thinking_budget", strconv.AppendUint(nil, uint64(f.Ext.MaxThinkingTokens.Value), 10))
		}
	}
	f.takes(MaxThinkingTokens, ok)
}

// askSGLang asks SGLang's tokenizer. Versions before 2026 refuse conversations.
// Newer ones use only the members here
// (python/sglang/srt/entrypoints/openai/serving_tokenize.py).
func (q *Question) askSGLang(post Post) []byte {
	switch {
	case q.says("chat_template", "reasoning", "truncate_prompt_tokens", "suffix"):
		return nil
	case q.API == apiChat:
		return tokenize(post, q.only("model", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message", "chat_template_kwargs"))
	}
	o := q.only("model")
	o.Raw("prompt", q.Text)
	return tokenize(post, o)
}
