package engine

import (
	"encoding/json"
	"fmt"
)

// ofGenerate are the members of SGLang's /generate. InputIDs is one of them.
type ofGenerate struct {
	Text           string          `json:"text"`
	RID            string          `json:"rid"`
	SamplingParams sampling        `json:"sampling_params"`
	SessionParams  json.RawMessage `json:"session_params"`
}

// sampling has the names of SGLang and of vLLM.
type sampling struct {
	MaxNewTokens *int `json:"max_new_tokens"`
	MinNewTokens int  `json:"min_new_tokens"`
	MaxTokens    *int `json:"max_tokens"`
	MinTokens    int  `json:"min_tokens"`
	IgnoreEOS    bool `json:"ignore_eos"`
}

// newTokens is how many tokens /generate answers with at most, unless the request says.
const newTokens = 128

// asCompletion says in a completion's members what a request of /generate says.
func (r *request) asCompletion() {
	r.Prompt, _ = json.Marshal(r.Text)
	r.MaxTokens, r.MinTokens, r.IgnoreEOS = r.SamplingParams.MaxNewTokens, r.SamplingParams.MinNewTokens, r.SamplingParams.IgnoreEOS
	if n := newTokens; r.MaxTokens == nil {
		r.MaxTokens = &n
	}
}

// appendGenerated appends the event of /generate for a number of tokens. Each event has
// the text from its beginning.
func (a *answer) appendGenerated(buf []byte, tokens, cached int) []byte {
	return fmt.Appendf(buf, "data: %s\n\n", a.generated(tokens, cached))
}

// generated returns the answer of /generate when a number of tokens is there.
func (a *answer) generated(tokens, cached int) []byte {
	meta := object{
		"id": a.id, "finish_reason": nil, "prompt_tokens": len(a.prompt.Tokens), "completion_tokens": tokens,
		"cached_tokens": cached, "weight_version": "default",
	}
	switch {
	case tokens < len(a.answer):
	case a.reason == "stop":
		meta["finish_reason"] = object{"type": "stop", "matched": endToken}
	default:
		meta["finish_reason"] = object{"type": "length", "length": tokens}
	}
	out, _ := json.Marshal(object{"text": text(a.answer[:tokens]), "output_ids": a.answer[:tokens], "meta_info": meta})
	return out
}
