package api

import (
	"testing"
)

func TestSkipsCache(t *testing.T) {
	for _, c := range []struct {
		api  API
		body string
		want bool
	}{
		{chat{}, `{"messages":[]}`, false},
		{chat{}, `{"messages":[],"prompt_logprobs":0}`, true},
		{chat{}, `{"messages":[],"prompt_logprobs":null}`, false},
		{chat{}, `{"messages":[],"cache_prompt":false}`, true},
		{chat{}, `{"messages":[],"cache_prompt":true}`, false},
		{completions{}, `{"prompt":"hello","echo":true,"logprobs":0}`, true},
		{completions{}, `{"prompt":"hello","echo":false}`, false},
		{generate{}, `{"text":"hello","logprob_start_len":0}`, true},
		{generate{}, `{"text":"hello","logprob_start_len":[0,0]}`, true},
		{generate{}, `{"text":"hello","logprob_start_len":-1}`, false},
		{generate{}, `{"text":"hello","return_logprob":true}`, false},
		{tokensIn{}, `{"token_ids":[1],"sampling_params":{"prompt_logprobs":1}}`, true},
		{tokensIn{}, `{"token_ids":[1],"sampling_params":{"prompt_logprobs":null}}`, false},
	} {
		if r := mustParse(t, c.api, c.body); r.SkipsCache != c.want {
			t.Errorf("%s %s: %v, want %v", c.api.Name(), c.body, r.SkipsCache, c.want)
		}
	}
}
