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
		{chat{}, `{"messages":[],"echo":true}`, true}, // top_logprobs is 0 by default
		{chat{}, `{"messages":[],"echo":true,"top_logprobs":3}`, true},
		{chat{}, `{"messages":[],"echo":true,"top_logprobs":null}`, false},
		{chat{}, `{"messages":[],"logprobs":true,"top_logprobs":3}`, false},
		{chat{}, `{"messages":[],"prompt_logprobs":0}`, true},
		{chat{}, `{"messages":[],"prompt_logprobs":null}`, false},
		{chat{}, `{"messages":[],"cache_prompt":false}`, true},
		{chat{}, `{"messages":[],"cache_prompt":true}`, false},
		{completions{}, `{"prompt":"hello","echo":true,"logprobs":0}`, true},
		{completions{}, `{"prompt":"hello","echo":true}`, false},
		{completions{}, `{"prompt":"hello","logprobs":1}`, false},
		{tokensIn{}, `{"token_ids":[1],"sampling_params":{"prompt_logprobs":1}}`, true},
		{tokensIn{}, `{"token_ids":[1],"sampling_params":{"prompt_logprobs":null}}`, false},
		{generate{}, `{"text":"hello","logprob_start_len":0}`, false},
		{generate{}, `{"text":"hello","return_logprob":true}`, false},
		{generate{}, `{"text":"hello","logprob_start_len":0,"return_logprob":true}`, true},
		{generate{}, `{"text":"hello","logprob_start_len":[0,0],"return_logprob":true}`, true},
		{generate{}, `{"text":"hello","logprob_start_len":[],"return_logprob":true}`, false},
		{generate{}, `{"text":"hello","logprob_start_len":-1,"return_logprob":true}`, false},
		{generate{}, `{"text":"hello","logprob_start_len":100000,"return_logprob":true}`, false}, // the prompt up to there is reused
	} {
		if r := mustParse(t, c.api, c.body); r.SkipsCache != c.want {
			t.Errorf("%s %s: %v, want %v", c.api.Name(), c.body, r.SkipsCache, c.want)
		}
	}
}
