package engine

import (
	"math"
	"slices"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// TRTLLM is TensorRT-LLM's trtllm-serve.
const TRTLLM = "trtllm"

// trtllm chooses the rank itself. It has no tokenizer endpoint.
var trtllm = kind{
	name: TRTLLM, owner: "tensorrt_llm", shows: (*server).isTRTLLM, read: (*server).readTRTLLM,
	all:    []string{"/update_weights", "/release_memory", "/resume_memory"},
	salts:  salted{sure: []string{api.NameChat}},
	tokens: map[string]string{api.NameChat: nameIDs},
	steers: slices.Concat(prioritySteering, ownPhases(nameDisaggregated)),
	always: (*adapter).cutForTRTLLM,
	adapt:  (*adapter).toTRTLLM,
	phases: trtllmPhases,
}

// isTRTLLM returns whether the server is a trtllm-serve: its /server_info is about
// transferring a prefill, null without that.
func (s *server) isTRTLLM() bool { return s.json(pathServerInfo).Get("disaggregated_params").Exists() }

// readTRTLLM reads the version and the context. The server reports its capacity
// nowhere. Reading /metrics would take the statistics from their other readers.
func (s *server) readTRTLLM(info *Info) {
	info.Version = s.version()
	info.ContextTokens = s.contextTokens()
}

// cutForTRTLLM removes nvext even if it is null: the server refuses unknown members.
func (f *adapter) cutForTRTLLM() {
	if f.Body != nil {
		f.Body.Cut(nameNVExt)
	}
}

// toTRTLLM sets TensorRT-LLM's own members. The operator must turn on what
// depends on the version. Its priorities are
// from 0 to 1: a higher one is earlier, and 0.5 is the default.
func (f *adapter) toTRTLLM() {
	if f.takes(Priority, f.on(api.NameChat, api.NameCompletions) && f.Settings.Priority == On) {
		n := float64(f.Ext.AgentHints.Priority.Value)
		f.Body.Set(namePriority, strconv.AppendFloat(nil, 0.5+n/(1+math.Abs(n))/2, 'f', -1, 64))
	}
	if f.takes(MaxThinkingTokens, f.on(api.NameChat, api.NameCompletions) && f.Settings.ThinkingBudget == On) {
		f.integer(nameBudget, int64(f.Ext.MaxThinkingTokens.Value))
	}
}
