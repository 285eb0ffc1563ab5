package engine

import (
	"bytes"
	"strconv"
	"time"
)

// isVLLM tells whether the server has vLLM's metrics: behind an API key, these
// and the version are all that it shows.
func (s *server) isVLLM() bool {
	if s.version() == "" {
		return false
	}
	status, page := s.ask(pathMetrics)
	return status == 200 && bytes.Contains(page, []byte("\nvllm:"))
}

// tellVLLM asks for what a vLLM tells: /version, the list of models, and the
// metrics, in which each data-parallel rank is an engine.
func (s *server) tellVLLM(told *Info) {
	told.ContextTokens = s.contextTokens()
	told.Version = s.version()
	if status, page := s.ask(pathMetrics); status == 200 {
		readVLLMMetrics(page, told)
	}
	if told.KVTokens < told.ContextTokens/leastContexts {
		told.KVTokens = 0
	}
}

// A cache must have room for so many blocks, and for this part of the longest
// context, to be believed: a vLLM with less would not have started.
const leastBlocks, leastContexts = 16, 8

// readVLLMMetrics reads vllm:cache_config_info, once for each rank, and
// process_start_time_seconds. Where several API servers share one page, the
// latter is missing.
func readVLLMMetrics(page []byte, told *Info) {
	ranks := make(map[string]bool)
	samples(page, func(name []byte, l labels, value float64) {
		switch string(name) {
		case "process_start_time_seconds":
			if value > 0 && value < maxCount {
				told.Started = time.UnixMilli(int64(value * 1000))
				told.Life = strconv.FormatInt(told.Started.UnixMilli(), 10)
			}
		case "vllm:cache_config_info":
			if len(ranks) < maxRanks {
				ranks[l.get("engine")] = true
				told.vllmCache(l)
			}
		}
	})
	told.DPSize = ranksOf(ranks)
}

// vllmCache takes in the cache of one rank.
func (t *Info) vllmCache(l labels) {
	size := l.count("block_size")
	tokens := l.count("kv_cache_size_tokens")
	if tokens == 0 { // older ones tell the blocks only
		tokens = l.count("num_gpu_blocks") * int64(within(size, maxBlockSize))
	}
	if tokens < leastBlocks*max(size, 1) {
		tokens = 0
	}
	if tokens > 0 && (t.KVTokens == 0 || tokens < t.KVTokens) {
		t.KVTokens = tokens
	}
	t.BlockSize = within(size, maxBlockSize)
	t.NoPrefixCache = l.get("enable_prefix_caching") == "False"
}

// ranksOf returns the number of ranks with these names. Those that do not count
// from 0 are a part of more, of which it is not known how to ask for them; a
// single one is not asked for.
func ranksOf(names map[string]bool) int {
	for i := range len(names) {
		if len(names) > 1 && !names[strconv.Itoa(i)] {
			return 0
		}
	}
	return len(names)
}

// toVLLM knows vLLM's members beyond OpenAI's. A lower priority is earlier
// there, and any but 0 an error unless it runs with --scheduling-policy
// priority, which it does not tell; so is thinking_token_budget where it does
// not know how the model's reasoning ends.
func (f *fit) toVLLM() {
	f.cacheSalt()
	if f.takes(Priority, f.on(apiChat, apiCompletions, apiResponses, apiTokens) && f.Settings.Priority == On) {
		f.integer(namePriority, -int64(f.Ext.AgentHints.Priority.Value))
	}
	budget := int64(f.Ext.MaxThinkingTokens.Value)
	switch takes := f.Settings.ThinkingBudget == On; {
	case f.takes(MaxThinkingTokens, takes && f.on(apiChat, apiCompletions)):
		f.integer("thinking_token_budget", budget)
	case takes && f.on(apiTokens):
		if all, ok := f.sampling(); f.takes(MaxThinkingTokens, ok) {
			all[0].Set("thinking_token_budget", strconv.AppendInt(nil, budget, 10))
		}
	}
}
