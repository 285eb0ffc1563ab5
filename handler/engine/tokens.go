package engine

// tokenMembers are where engines of each type take a prompt's token ids by the
// API, beside completions, where all do. Those of TensorRT-LLM and SGLang take
// the place of what a chat's template would make.
var tokenMembers = map[string]map[string]tokenMember{
	VLLM:   {apiTokens: {name: "token_ids"}},
	SGLang: {apiChat: {name: "input_ids"}, apiGenerate: {name: "input_ids", instead: "text"}},
	TRTLLM: {apiChat: {name: "prompt_token_ids"}},
}

// tokenMember is a member of a body that has token ids, and another one that it
// takes the place of, if not its own.
type tokenMember struct{ name, instead string }

// memberFor returns where an engine of a type takes the token ids, with an empty
// name if it does not. It does not hold for Dynamo, which takes nvext.
func memberFor(kind, api string) tokenMember {
	if api == apiCompletions {
		return tokenMember{name: "prompt"}
	}
	return tokenMembers[kind][api]
}

// TakesTokenData tells whether the engine takes the ids of token_data as the prompt
// of a request of an API. A Dynamo decides that itself. If the type is unknown,
// only completions are known to take them.
func (e *Engine) TakesTokenData(api string) bool {
	return e.Type != Dynamo && memberFor(e.Type, api).name != ""
}

// giveTokens gives the engine the ids of token_data as its prompt, if the caller
// has planned these and the engine takes them.
func (f *fit) giveTokens() {
	to := memberFor(f.Type, f.API)
	at, ok := f.Body.NVExt()
	if !f.takes(TokenData, ok && to.name != "" && f.GiveTokens) {
		return
	}
	f.Body.Set(to.name, f.part(at, f.Ext.TokenSpan))
	if to.instead != "" {
		f.Body.Cut(to.instead)
	}
}
