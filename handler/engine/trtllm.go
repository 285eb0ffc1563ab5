package engine

import (
	"math"
	"strconv"
)

// isTRTLLM tells whether the server is a trtllm-serve: what it tells at
// /server_info is about handing over a prefill, null where it does not.
func (s *server) isTRTLLM() bool { return s.json(pathServerInfo).Get("disaggregated_params").Exists() }

// tellTRTLLM asks for the version. Its capacity it tells nowhere: /metrics has
// what happened since it was last asked, and must be left to whoever reads it.
func (s *server) tellTRTLLM(told *Info) {
	told.Version = s.version()
	told.ContextTokens = s.contextTokens()
}

// toTRTLLM knows TensorRT-LLM's members beyond OpenAI's. It refuses requests
// with members that it does not know, so that what depends on its version is
// left to the operator. Its priorities are from 0 to 1, where higher is earlier
// and 0.5 what others have.
func (f *fit) toTRTLLM() {
	f.cacheSalt()
	if f.takes(Priority, f.on(apiChat, apiCompletions) && f.Settings.Priority == On) {
		n := float64(f.Ext.AgentHints.Priority.Value)
		f.Body.Set(namePriority, strconv.AppendFloat(nil, 0.5+n/(1+math.Abs(n))/2, 'f', -1, 64))
	}
	if f.takes(MaxThinkingTokens, f.on(apiChat, apiCompletions) && f.Settings.ThinkingBudget == On) {
		f.integer("thinking_token_budget", int64(f.Ext.MaxThinkingTokens.Value))
	}
}
