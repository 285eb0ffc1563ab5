package engine

// toOther knows no engine, but OpenAI's API: what every server with it has. A
// salt goes along all the same, for it is better refused than lost.
func (f *fit) toOther() {
	if f.takes(CacheSalt, f.on(apiChat, apiCompletions, apiResponses)) {
		f.text("cache_salt", f.salt(maxVLLMSalt))
	}
}
