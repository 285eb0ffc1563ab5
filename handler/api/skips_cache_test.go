package api

import (
	"fmt"
	"strings"
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

// BenchmarkRepeatedIDs reads an answer of SGLang's, which has all ids in each event.
// That of a prompt of ids, whose chain goes on with them, should cost as much as
// that of a text.
func BenchmarkRepeatedIDs(b *testing.B) {
	var events []string
	size := 0
	ids := ""
	for i := range 2000 {
		ids += fmt.Sprint(100000+i) + ", "
		e := fmt.Sprintf("data: {\"text\": \"\", \"output_ids\": [%s], \"meta_info\": {\"prompt_tokens\": 6, \"completion_tokens\": %d, \"finish_reason\": null}}\n\n",
			strings.TrimSuffix(ids, ", "), i+1)
		events, size = append(events, e), size+len(e)
	}
	for name, body := range map[string]string{"text": `{"text":"hello hello hello","stream":true}`, "ids": `{"input_ids":[1,2,3,4,5,6],"stream":true}`} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				r := mustParse(b, generate{}, body)
				a := observe(r, true)
				for _, e := range events {
					a.Write([]byte(e))
				}
				a.Finish()
			}
		})
	}
}
