package engine

import "encoding/json"

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
