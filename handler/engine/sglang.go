package engine

import (
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/tidwall/gjson"
)

// sglangInfo returns what an SGLang tells at /server_info, or at
// /get_server_info as older ones do.
func (s *server) sglangInfo() gjson.Result {
	if info := s.json(pathServerInfo); showsSGLang(info) {
		return info
	}
	if info := s.json("/get_server_info"); showsSGLang(info) {
		return info
	}
	return gjson.Result{}
}

func (s *server) isSGLang() bool { return s.sglangInfo().IsObject() }

// showsSGLang tells whether an object is SGLang's: its arguments, what its
// scheduler found out, and the state of its ranks.
func showsSGLang(info gjson.Result) bool {
	return info.Get("max_total_num_tokens").Exists() || info.Get("internal_states").IsArray()
}

func (s *server) tellSGLang(told *Info) {
	told.ContextTokens = s.contextTokens()
	readSGLang(s.sglangInfo(), told)
}

// readSGLang reads /server_info. Figures are of one rank, and of the first where
// each has its own.
func readSGLang(info gjson.Result, told *Info) {
	first := info.Get("internal_states.0")
	told.Version = readVersion(info)
	told.KVTokens = count(info.Get("max_total_num_tokens"))
	orDefault(&told.KVTokens, count(first.Get("memory_usage.token_capacity")))
	told.BlockSize = within(count(info.Get("page_size")), maxBlockSize)
	told.DPSize = within(count(info.Get("dp_size")), maxRanks)
	orDefault(&told.ContextTokens, count(info.Get("context_length")))
	running := count(first.Get("effective_max_running_requests_per_dp"))
	orDefault(&running, count(info.Get("max_running_requests")))
	told.MaxRunning = within(running, maxCount)
	told.NoPrefixCache = info.Get("disable_radix_cache").Type == gjson.True
	told.Priority = info.Get("enable_priority_scheduling").Type == gjson.True
	told.LowFirst = told.Priority && info.Get("schedule_low_priority_values_first").Type == gjson.True
	// It can be told to refuse priorities that it does not schedule by.
	told.PriorityEviction = info.Get("radix_eviction_policy").Str == "priority" &&
		(told.Priority || info.Get("abort_on_priority_when_disabled").Type != gjson.True)
	told.StrictThinking = info.Get("enable_strict_thinking").Type == gjson.True && info.Get("reasoning_parser").Str != ""
	// It does not tell when it started, but draws a seed then; how much memory
	// was free at that time varies, too.
	if seed := info.Get("random_seed"); seed.Type == gjson.Number {
		told.Life = cleaned(seed.Raw + "/" + info.Get("max_total_num_tokens").Raw)
	}
}

// toSGLang knows SGLang's members beyond OpenAI's. A higher priority is earlier
// there, unless --schedule-low-priority-values-first turns that round; it is
// heeded with --enable-priority-scheduling only, or for what the cache keeps
// with --radix-eviction-policy priority. A limit of reasoning needs
// --enable-strict-thinking.
func (f *fit) toSGLang() {
	f.cacheSalt()
	f.sessionParams()
	own := f.on(apiChat, apiCompletions, apiGenerate)
	f.sglangPriority(own)
	f.sglangThinking(own)
}

// sglangRank tells the rank in the body, too: which of header and body is heeded
// depends on the version and on the path. The member has an older name, which is
// an alias of the newer one in newer versions: a client's must not steer.
func (f *fit) sglangRank() {
	if f.Ranks < 2 || f.Body == nil {
		return
	}
	switch {
	case f.Info.Version == "" || before(f.Info.Version, 0, 5, 10):
		f.integer(nameOldRank, int64(f.Rank))
	default:
		f.Body.Cut(nameOldRank)
	}
	f.integer(nameRank, int64(f.Rank))
}

// evicts tells whether SGLang's cache keeps what has a higher priority.
func (f *fit) evicts() bool { return f.Info.PriorityEviction && f.Settings.Priority != Off }

func (f *fit) sglangPriority(own bool) {
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
}

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
