package engine

import "github.com/tidwall/gjson"

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

func (s *server) tellSGLang(told *Told) {
	told.ContextTokens = s.contextTokens()
	readSGLang(s.sglangInfo(), told)
}

// readSGLang reads /server_info. Figures are of one rank, and of the first where
// each has its own.
func readSGLang(info gjson.Result, told *Told) {
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
	// It does not tell when it started, but draws a seed then; how much memory
	// was free at that time varies, too.
	if seed := info.Get("random_seed"); seed.Type == gjson.Number {
		told.Life = cleaned(seed.Raw + "/" + info.Get("max_total_num_tokens").Raw)
	}
}
