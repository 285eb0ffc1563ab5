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

// Prompt is which prompt an engine computes for a request with token_data.
type Prompt uint8

// The prompts.
const (
	// EitherPrompt is one of the two, it is not known which.
	EitherPrompt Prompt = iota
	// BodyPrompt is what the body says beside nvext.
	BodyPrompt
	// TokenPrompt are the ids of token_data.
	TokenPrompt
)

// PromptOf returns the prompt that an engine of a type computes for a request of
// an API that has token_data: its ids where it takes them. A Dynamo has conditions
// of its own. Of a type that is not known yet, which is empty, it is said for
// completions only.
func PromptOf(kind, api string) Prompt {
	switch {
	case kind == Dynamo:
		return EitherPrompt
	case memberFor(kind, api).name != "":
		return TokenPrompt
	case kind == "":
		return EitherPrompt
	}
	return BodyPrompt
}

// giveTokens gives the engine the ids of token_data as its prompt, where it takes
// them and the caller does not want the body's own.
func (f *fit) giveTokens() {
	f.Prompt = BodyPrompt
	to := memberFor(f.kind, f.API)
	at, ok := f.Body.NVExt()
	if !f.takes(TokenData, ok && to.name != "" && !f.KeepPrompt) {
		return
	}
	f.Prompt = TokenPrompt
	f.Body.Set(to.name, f.part(at, f.Ext.TokenSpan))
	if to.instead != "" {
		f.Body.Cut(to.instead)
	}
}
