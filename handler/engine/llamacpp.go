package engine

import "github.com/tidwall/gjson"

func (s *server) isLlamaCpp() bool {
	props := s.json("/props")
	return props.Get("total_slots").Exists() && props.Get("default_generation_settings").Exists()
}

func (s *server) tellLlamaCpp(told *Info) { readProps(s.json("/props"), told) }

// readProps reads /props of llama.cpp's server. Its cache has no blocks: each
// slot keeps the latest prompt that it served. The slots share one cache, of the
// size that each of them tells, unless it was split among them; that it does not
// tell, and the smaller of both is what is certain.
func readProps(props gjson.Result, told *Info) {
	told.Version = cleaned(props.Get("build_info").Str)
	told.MaxRunning = within(count(props.Get("total_slots")), 1<<16)
	told.ContextTokens = count(props.Get("default_generation_settings.n_ctx"))
	orDefault(&told.ContextTokens, count(props.Get("n_ctx"))) // where older ones have it
	told.KVTokens = told.ContextTokens
}

// toLlamaCpp knows the members of llama.cpp's server, which passes over those
// that it does not know: older ones do not limit reasoning.
func (f *fit) toLlamaCpp() {
	f.cacheSalt()
	if f.takes(MaxThinkingTokens, f.on(apiChat) && f.Settings.ThinkingBudget != Off) {
		f.integer("thinking_budget_tokens", int64(f.Ext.MaxThinkingTokens.Value))
	}
}
