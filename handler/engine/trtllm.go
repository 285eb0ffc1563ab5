package engine

// isTRTLLM tells whether the server is a trtllm-serve: what it tells at
// /server_info is about handing over a prefill, null where it does not.
func (s *server) isTRTLLM() bool { return s.json(pathServerInfo).Get("disaggregated_params").Exists() }

// tellTRTLLM asks for the version. Its capacity it tells nowhere: /metrics has
// what happened since it was last asked, and must be left to whoever reads it.
func (s *server) tellTRTLLM(told *Told) {
	told.Version = s.version()
	told.ContextTokens = s.contextTokens()
}
