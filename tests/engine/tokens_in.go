package engine

import "encoding/json"

// ofTokensIn are the members of vLLM's /inference/v1/generate, besides SamplingParams.
type ofTokensIn struct {
	TokenIDs json.RawMessage `json:"token_ids"`
}

// tokensAsCompletion says in a completion's members what a request of /inference/v1/generate
// says.
func (r *request) tokensAsCompletion() {
	r.Prompt = r.TokenIDs
	r.MaxTokens, r.MinTokens, r.IgnoreEOS = r.SamplingParams.MaxTokens, r.SamplingParams.MinTokens, r.SamplingParams.IgnoreEOS
}
