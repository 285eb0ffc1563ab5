package engine

// tokenMembers are the members for a prompt's token ids, by engine type and API.
// All engines accept them in completions. In a chat, the ids of TensorRT-LLM and
// SGLang replace the result of the template.
var tokenMembers = map[string]map[string]tokenMember{
	VLLM:   {apiTokens: {name: "token_ids"}},
	SGLang: {apiChat: {name: "input_ids"}, apiGenerate: {name: "input_ids", instead: "text"}},
	TRTLLM: {apiChat: {name: "prompt_token_ids"}},
}

// tokenMember is a member with token ids, and another member that it replaces.
type tokenMember struct{ name, instead string }

// memberFor returns the member for token ids. Its name is empty if there is none.
// It does not hold for Dynamo, which reads nvext.
func memberFor(kind, api string) tokenMember {
	if api == apiCompletions {
		return tokenMember{name: "prompt"}
	}
	return tokenMembers[kind][api]
}

// TakesTokenData returns whether the engine accepts the ids of token_data as the
// prompt of a request of an API. It returns false for Dynamo, which decides that
// itself.
func (e *Engine) TakesTokenData(api string) bool {
	return e.Type != Dynamo && memberFor(e.Type, api).name != ""
}

// giveTokens makes the ids of token_data the engine's prompt, if the caller has
// planned that and the engine accepts them.
func (f *fit) giveTokens() {
	to := memberFor(f.Type, f.API)
	at, ok := f.Body.NVExt()
	if !f.takes(TokenData, ok && to.name != "" && f.GiveTokens) {
		return
	}
	f.Body.Set(to.name, f.Body.Text(at.Within(f.Ext.TokenSpan)))
	if to.instead != "" {
		f.Body.Cut(to.instead)
	}
}
