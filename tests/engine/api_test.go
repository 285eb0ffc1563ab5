package engine

import (
	"net/http"
	"slices"
	"strings"
	"testing"
)

// TestChat has a chat answered whole and as a stream: the same words, in vLLM's
// shapes.
func TestChat(t *testing.T) {
	e := start(t, Config{Name: "one", AnswerTokens: 12})
	whole := post(t.Context(), e.chatURL(), chatOf(nil, "Hello"), "X-Request-Id", "r1")
	v := whole.json(t)
	said := text0(at(v, "choices", 0, "message", "content"))
	if whole.header.Get(EngineHeader) != "one" || at(v, "id") != "chatcmpl-r1" || at(v, "object") != "chat.completion" ||
		at(v, "choices", 0, "finish_reason") != "stop" || at(v, "choices", 0, "message", "role") != "assistant" || len(said) != 44 {
		t.Errorf("header %v, answer %s", whole.header, whole.body)
	}
	prompt := len(tokenize("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"))
	if number(at(v, "usage", "prompt_tokens")) != prompt || number(at(v, "usage", "completion_tokens")) != 12 ||
		number(at(v, "usage", "total_tokens")) != prompt+12 || cached(v) != 0 {
		t.Errorf("usage %v", at(v, "usage"))
	}

	stream := post(t.Context(), e.chatURL(), chatOf(doc{"stream": true, "stream_options": doc{"include_usage": true}}, "Hello"))
	if got := stream.header.Get("Content-Type"); got != "text/event-stream; charset=utf-8" {
		t.Errorf("content type %q", got)
	}
	events, done := stream.events(t)
	if !done || len(events) != 1+12+1 {
		t.Fatalf("%d events, done %v: %s", len(events), done, stream.body)
	}
	if d := at(events[0], "choices", 0, "delta"); at(d, "role") != "assistant" || at(d, "content") != "" || !has(events[0], "prompt_token_ids") {
		t.Errorf("first event %v", events[0])
	}
	var b strings.Builder
	for i, ev := range events[1:13] {
		b.WriteString(text0(at(ev, "choices", 0, "delta", "content")))
		if reason := at(ev, "choices", 0, "finish_reason"); (reason == "stop") != (i == 11) || has(ev, "usage") || has(ev, "prompt_token_ids") {
			t.Errorf("event %v", ev)
		}
	}
	if b.String() != said {
		t.Errorf("streamed %q, whole %q", b.String(), said)
	}
	if u := events[13]; len(at(u, "choices").([]any)) != 0 || number(at(u, "usage", "completion_tokens")) != 12 || cached(u) != 0 {
		t.Errorf("usage event %v", u)
	}
}

// TestCompletions has all forms of a prompt, and the lengths of answers.
func TestCompletions(t *testing.T) {
	e := start(t, Config{AnswerTokens: 40})
	for _, tc := range []struct {
		name   string
		body   doc
		prompt int
		answer int
		reason string
	}{
		{"text", doc{"prompt": "abcdefgh"}, 2, 16, "length"},
		{"ids", doc{"prompt": []int{5, 6, 7}, "max_tokens": 3}, 3, 3, "length"},
		{"list of one text", doc{"prompt": []string{"abcd"}, "max_tokens": 40}, 1, 40, "stop"},
		{"ignoring the end", doc{"prompt": "x", "max_tokens": 50, "ignore_eos": true}, 1, 50, "length"},
		{"at least", doc{"prompt": "x", "max_tokens": 90, "min_tokens": 60}, 1, 60, "stop"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := post(t.Context(), e.completionURL(), tc.body).json(t)
			if number(at(v, "usage", "prompt_tokens")) != tc.prompt || number(at(v, "usage", "completion_tokens")) != tc.answer ||
				at(v, "choices", 0, "finish_reason") != tc.reason || at(v, "object") != "text_completion" || !strings.HasPrefix(text0(at(v, "id")), "cmpl-") {
				t.Errorf("answer %v", v)
			}
			tc.body["stream"] = true
			events, done := post(t.Context(), e.completionURL(), tc.body).events(t)
			var b strings.Builder
			for _, ev := range events {
				b.WriteString(text0(at(ev, "choices", 0, "text")))
			}
			if len(events) != tc.answer || !done || b.String() != at(v, "choices", 0, "text") {
				t.Errorf("%d events, done %v, %q, whole %q", len(events), done, b.String(), at(v, "choices", 0, "text"))
			}
		})
	}
}

// TestReturnTokenIDs has the places of the ids that a real vLLM has, which differ
// between the two APIs.
func TestReturnTokenIDs(t *testing.T) {
	e := start(t, Config{AnswerTokens: 4})
	chat := chatOf(doc{"return_token_ids": true}, "Hi")
	v := post(t.Context(), e.chatURL(), chat).json(t)
	prompt := at(v, "prompt_token_ids").([]any)
	if len(prompt) != number(at(v, "usage", "prompt_tokens")) || len(at(v, "choices", 0, "token_ids").([]any)) != 4 {
		t.Errorf("chat: %v", v)
	}
	chat["stream"] = true
	events, _ := post(t.Context(), e.chatURL(), chat).events(t)
	for i, ev := range events {
		ids, _ := at(ev, "choices", 0, "token_ids").([]any)
		if i == 0 && (len(at(ev, "prompt_token_ids").([]any)) != len(prompt) || len(ids) != 0) ||
			i > 0 && (has(ev, "prompt_token_ids") || len(ids) != 1) {
			t.Errorf("event %d of a chat: %v", i, ev)
		}
	}

	body := doc{"prompt": []int{100, 200, 300}, "return_token_ids": true, "max_tokens": 4}
	v = post(t.Context(), e.completionURL(), body).json(t)
	if has(v, "prompt_token_ids") || len(at(v, "choices", 0, "prompt_token_ids").([]any)) != 3 || len(at(v, "choices", 0, "token_ids").([]any)) != 4 {
		t.Errorf("completion: %v", v)
	}
	body["stream"] = true
	events, _ = post(t.Context(), e.completionURL(), body).events(t)
	for i, ev := range events {
		c := at(ev, "choices", 0)
		ids, _ := at(c, "prompt_token_ids").([]any)
		if !has(c, "prompt_token_ids") || (len(ids) == 3) != (i == 0) || len(at(c, "token_ids").([]any)) != 1 {
			t.Errorf("event %d of a completion: %v", i, ev)
		}
	}
	if v := post(t.Context(), e.chatURL(), chatOf(nil, "Hi")).json(t); at(v, "prompt_token_ids") != nil || at(v, "choices", 0, "token_ids") != nil {
		t.Errorf("ids that were not asked for: %v", v)
	}
}

// TestErrors has the errors of a real vLLM.
func TestErrors(t *testing.T) {
	e := start(t, Config{MaxModelLen: 100, LoRAs: []string{"ad1"}})
	long := strings.Repeat("abcd", 101)
	for _, tc := range []struct {
		name, path string
		body       any
		header     []string
		status     int
		kind       string
		param      any
		message    string
	}{
		{"unknown model", "/v1/chat/completions", doc{"model": "x", "messages": []doc{{"role": "user", "content": "a"}}}, nil, 404, "NotFoundError", "model", "`x` does not exist"},
		{"too long", "/v1/completions", doc{"prompt": long}, nil, 400, "BadRequestError", "input_tokens", "maximum context length is 100 tokens"},
		{"bad JSON", "/v1/completions", `{"prompt": `, nil, 400, "Bad Request", nil, "JSON"},
		{"no messages", "/v1/chat/completions", doc{}, nil, 400, "Bad Request", nil, "messages"},
		{"image", "/v1/chat/completions", doc{"messages": []doc{{"role": "user", "content": []doc{{"type": "image_url"}}}}}, nil, 400, "Bad Request", nil, "image_url"},
		{"rank", "/v1/completions", doc{"prompt": "a"}, []string{"X-data-parallel-rank", "7"}, 400, "BadRequestError", nil, "data_parallel_rank 7 is out of range [0, 1)."},
		{"unknown path", "/v1/nothing", doc{}, nil, 404, "Not Found", nil, "Not Found"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := post(t.Context(), e.URL()+tc.path, tc.body, tc.header...)
			status := r.status
			r.status = http.StatusOK
			err := at(r.json(t), "error")
			if status != tc.status || at(err, "type") != tc.kind || at(err, "param") != tc.param || !has(err, "param") ||
				number(at(err, "code")) != tc.status || !strings.Contains(text0(at(err, "message")), tc.message) {
				t.Errorf("status %d, %s", status, r.body)
			}
			if rec := e.lastRecord(t, tc.path); rec.Outcome != Failed || rec.Status != tc.status {
				t.Errorf("record %+v", rec)
			}
		})
	}
	for i, body := range []doc{{"prompt": long[:360], "max_tokens": 10}, {"prompt": "a", "model": "ad1"}, {"prompt": "a", "model": "sim-8b", "n": 1, "priority": 0}} {
		if r := post(t.Context(), e.completionURL(), body); r.status != http.StatusOK {
			t.Errorf("request %d: status %d, %s", i, r.status, r.body)
		}
	}
}

// TestSurface has what is asked beside inference.
func TestSurface(t *testing.T) {
	e := start(t, Config{MaxModelLen: 4096, LoRAs: []string{"ad1"}})
	if r := get(t.Context(), e.URL()+"/health"); r.status != http.StatusOK || len(r.body) != 0 {
		t.Errorf("health: %d %q", r.status, r.body)
	}
	if v := get(t.Context(), e.URL()+"/version").json(t); at(v, "version") == nil {
		t.Errorf("version: %v", v)
	}
	if v := get(t.Context(), e.URL()+"/load").json(t); number(at(v, "server_load")) != 0 {
		t.Errorf("load: %v", v)
	}
	v := get(t.Context(), e.URL()+"/v1/models").json(t)
	if m := at(v, "data", 0); at(m, "id") != "sim-8b" || at(m, "owned_by") != "vllm" || number(at(m, "max_model_len")) != 4096 || at(m, "parent") != nil {
		t.Errorf("models: %v", v)
	}
	if m := at(v, "data", 1); at(m, "id") != "ad1" || at(m, "parent") != "sim-8b" {
		t.Errorf("models: %v", v)
	}

	chat := chatOf(doc{"return_token_ids": true}, "Hello, how are you?")
	used := at(post(t.Context(), e.chatURL(), chat).json(t), "prompt_token_ids").([]any)
	v = post(t.Context(), e.URL()+"/tokenize", chat).json(t)
	if got := at(v, "tokens").([]any); !slices.Equal(got, used) || number(at(v, "count")) != len(used) || number(at(v, "max_model_len")) != 4096 || !has(v, "token_strs") {
		t.Errorf("tokenize: %v, used were %v", v, used)
	}
	v = post(t.Context(), e.URL()+"/tokenize", doc{"prompt": "abcdef", "return_token_strs": true}).json(t)
	if at(v, "token_strs", 0) != "abcd" || at(v, "token_strs", 1) != "ef" {
		t.Errorf("tokenize: %v", v)
	}
}
