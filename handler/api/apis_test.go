package api

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// every is one of each API, for what must hold for all of them.
var every = func() (out []API) {
	for _, e := range apis {
		out = append(out, e.api)
	}
	return out
}()

const (
	askMessages  = `{"max_tokens":9,"messages":[{"role":"user","content":"say hello"}]}`
	askResponses = `{"input":"say hello"}`
	askGenerate  = `{"text":"say hello, "}`
)

func answerOf(t *testing.T, a API, request string, stream bool, events ...string) *observed {
	t.Helper()
	if stream {
		events = asEvents(events...)
	}
	return answered(mustParse(t, a, request), stream, 0, events...)
}

func TestAnswersOfOtherAPIs(t *testing.T) {
	text := `{"type":"content_block_delta","delta":{"type":"text_delta","text":"hi"}}`
	tool := `{"type":"content_block_start","content_block":{"type":"tool_use","name":"f","input":{}}}`
	ends := `{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":3}}`
	think := `{"type":"content_block_start","content_block":{"type":"thinking","thinking":""}}`
	thought := `{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"hm"}}`
	reply := func(status, output string) string {
		return `{"object":"response","status":"` + status + `","output":[` + output + `],"error":null}`
	}
	said := `{"type":"message","role":"assistant","content":[{"type":"output_text","text":"hi"}]}`
	for name, c := range map[string]struct {
		api                             API
		request                         string
		stream                          bool
		events                          []string
		prediction, first, done, failed bool
	}{
		"messages ok":                  {messages{}, askMessages, true, []string{text, ends}, true, true, true, false},
		"messages unfinished":          {messages{}, askMessages, true, []string{text}, false, true, false, false},
		"messages stop only":           {messages{}, askMessages, true, []string{text, `{"type":"message_stop"}`}, true, true, true, false},
		"messages start is no token":   {messages{}, askMessages, true, []string{`{"type":"message_start","message":{"content":[],"usage":{"input_tokens":3}}}`, `{"type":"ping"}`, think, `{"type":"content_block_start","content_block":{"type":"text","text":""}}`}, false, false, false, false},
		"messages thinking":            {messages{}, askMessages, true, []string{think, thought, text, ends}, false, true, true, false},
		"messages redacted":            {messages{}, askMessages, true, []string{`{"type":"content_block_start","content_block":{"type":"redacted_thinking","data":"x"}}`, ends}, false, true, true, false},
		"messages tool":                {messages{}, askMessages, true, []string{text, tool, ends}, true, true, true, false},
		"messages text behind a tool":  {messages{}, askMessages, true, []string{tool, text, ends}, false, true, true, false},
		"messages error":               {messages{}, askMessages, true, []string{text, `{"type":"error","error":{"type":"api_error","message":"x"}}`}, false, true, true, true},
		"messages plain error":         {messages{}, askMessages, false, []string{`{"type":"error","error":{"type":"not_found_error","message":"x"}}`}, false, false, true, true},
		"messages OpenAI's error":      {messages{}, askMessages, false, []string{`{"error":{"message":"x"}}`}, false, false, true, true},
		"messages plain thinking":      {messages{}, askMessages, false, []string{`{"type":"message","content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"hi"}],"stop_reason":"end_turn"}`}, false, true, true, false},
		"messages continued":           {messages{}, `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"He"}]}`, true, []string{text, ends}, false, true, true, false},
		"messages broken":              {messages{}, askMessages, true, []string{`{"type":"content_block_delta","delta":{`, ends}, false, false, true, false},
		"messages no object":           {messages{}, askMessages, true, []string{`[1]`, ends}, false, false, true, false},
		"responses ok":                 {responses{}, askResponses, true, []string{`{"type":"response.output_text.delta","delta":"hi"}`, `{"type":"response.completed","response":` + reply("completed", said) + `}`}, true, true, true, false},
		"responses incomplete":         {responses{}, askResponses, true, []string{`{"type":"response.incomplete","response":` + reply("incomplete", said) + `}`}, true, true, true, false},
		"responses failed":             {responses{}, askResponses, true, []string{`{"type":"response.failed","response":` + reply("failed", "") + `}`}, false, false, true, true},
		"responses error":              {responses{}, askResponses, true, []string{`{"type":"error","code":"x","message":"y"}`}, false, false, true, true},
		"responses created":            {responses{}, askResponses, true, []string{`{"type":"response.created","response":` + reply("in_progress", "") + `}`}, false, false, false, false},
		"responses reasoning":          {responses{}, askResponses, true, []string{`{"type":"response.reasoning_text.delta","delta":"hm"}`, `{"type":"response.completed","response":` + reply("completed", said) + `}`}, false, true, true, false},
		"responses reasoning item":     {responses{}, askResponses, false, []string{reply("completed", `{"type":"reasoning","summary":[]},`+said)}, false, true, true, false},
		"responses think in text":      {responses{}, askResponses, false, []string{reply("completed", `{"type":"message","role":"assistant","content":[{"type":"output_text","text":"hm</think>hi"}]}`)}, false, true, true, false},
		"responses refusal":            {responses{}, askResponses, false, []string{reply("completed", `{"type":"message","role":"assistant","content":[{"type":"refusal","refusal":"no"}]}`)}, false, true, true, false},
		"responses own tool":           {responses{}, askResponses, false, []string{reply("completed", `{"type":"web_search_call"},`+said)}, false, true, true, false},
		"responses queued":             {responses{}, askResponses, false, []string{reply("queued", "")}, false, false, false, false},
		"responses does not say again": {responses{}, askResponses, true, []string{`{"type":"response.output_text.delta","delta":"hi"}`, `{"type":"response.completed","response":` + reply("completed", "") + `}`}, false, true, true, false},
		"responses continued":          {responses{}, `{"input":[{"role":"user","content":"x"},{"role":"assistant","content":"He"}]}`, false, []string{reply("completed", said)}, false, true, true, false},
		"generate ok":                  {generate{}, askGenerate, true, []string{`{"text":"he","meta_info":{"completion_tokens":1,"finish_reason":null}}`, `{"text":"hello","meta_info":{"completion_tokens":2,"finish_reason":{"type":"stop"}}}`, `[DONE]`}, true, true, true, false},
		"generate in pieces":           {generate{}, askGenerate, true, []string{`{"text":"hell","meta_info":{"completion_tokens":1,"finish_reason":null}}`, `{"text":"o, longer","meta_info":{"completion_tokens":2,"finish_reason":{"type":"stop"}}}`}, false, true, true, false},
		"generate abort":               {generate{}, askGenerate, true, []string{`{"text":"he","meta_info":{"completion_tokens":1,"finish_reason":{"type":"abort","message":"x","status_code":500}}}`}, false, true, true, true},
		"generate old finish":          {generate{}, askGenerate, false, []string{`{"text":"hello","meta_info":{"finish_reason":"length"}}`}, true, true, true, false},
		"generate error":               {generate{}, askGenerate, true, []string{`{"error":{"message":"x"}}`, `[DONE]`}, false, false, true, true},
		"generate flat error":          {generate{}, askGenerate, false, []string{`{"object":"error","message":"x"}`}, false, false, true, true},
		"generate vLLM":                {generate{}, `{"prompt":"say hello, "}`, false, []string{`{"text":["say hello, hello"]}`}, false, true, true, false},
		"generate n":                   {generate{}, `{"text":"say hello, ","sampling_params":{"n":2}}`, false, []string{`[{"text":"a","meta_info":{"finish_reason":{"type":"stop"}}},{"text":"b","meta_info":{"finish_reason":{"type":"stop"}}}]`}, false, true, true, false},
		"embeddings error":             {pooled{name: "embeddings"}, `{"input":"x"}`, false, []string{`{"error":{"message":"x"}}`}, false, false, true, true},
		"embeddings batch of SGLang":   {pooled{name: "classify"}, `{"text":["a","b"]}`, false, []string{`[{"embedding":[1],"meta_info":{"prompt_tokens":1}}]`}, false, true, true, false},
		"score of SGLang":              {scored{pooled{name: "score"}}, `{"query":"a","items":["b"]}`, false, []string{`{"scores":[[0.1]],"object":"scoring"}`}, false, true, true, false},
		"count error":                  {countTokens{}, askMessages, false, []string{`{"type":"error","error":{"message":"x"}}`}, false, false, true, true},
	} {
		n := answerOf(t, c.api, c.request, c.stream, c.events...)
		if got := n.Prediction() != nil; got != c.prediction || n.FirstToken() != c.first || n.Done() != c.done || n.Failed() != c.failed {
			t.Errorf("%s: prediction %v, first %v, done %v, failed %v", name, got, n.FirstToken(), n.Done(), n.Failed())
		}
	}
}

func TestPromptsInOtherForms(t *testing.T) {
	words := "a text that is longer than two blocks\n"
	quoted := `"a text that is longer than two blocks\n"`
	for _, c := range []struct {
		api     API
		body    string
		kind    Kind
		blocks  []uint64
		bytes   int64
		tokens  int64
		prompts int
	}{
		{generate{}, `{"text":` + quoted + `}`, Text, blocksOf(spelled(words)), 39, 0, 1},
		{generate{}, `{"text":[` + quoted + `,"x"]}`, Text, blocksOf(spelled(words)), 40, 0, 2},
		{generate{}, `{"input_ids":[1,2,3,4,5]}`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 5, 1},
		{generate{}, `{"text":null,"input_ids":[[1,2,3,4],[5]]}`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 5, 2},
		{generate{}, `{"prompt":` + quoted + `}`, Text, blocksOf(spelled(words)), 39, 0, 1},
		{generate{}, `{"input_ids":[1,2,3,4],"image_data":"x.png"}`, None, nil, 0, 0, 1},
		{generate{}, `{}`, None, nil, 0, 0, 1},
		{tokensIn{}, `{"token_ids":[1,2,3,4,5]}`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 5, 1},
		{chat{}, `{"messages":[{"role":"user","content":"x"}],"input_ids":[1,2,3,4,5]}`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 5, 1},
		{chat{}, `{"messages":[{"role":"user","content":"x"}],"input_ids":null}`, Text, nil, 7, 0, 1},
		{completions{}, `{"prompt":"","prompt_token_ids":[1,2,3,4,5]}`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 5, 1},
		{pooled{name: "embeddings"}, `{"input":` + quoted + `}`, Text, blocksOf(spelled(words)), 39, 0, 1},
		{pooled{name: "embeddings"}, `{"input":[` + quoted + `,"xy"]}`, Text, blocksOf(spelled(words)), 41, 0, 2},
		{pooled{name: "embeddings"}, `{"input":[1,2,3,4]}`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 4, 1},
		{pooled{name: "embeddings"}, `{"input":[[1,2,3,4],[1]]}`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 5, 2},
		{pooled{name: "pooling"}, `{"messages":[{"role":"user","content":"x"}]}`, Text, nil, 7, 0, 1},
		{pooled{name: "pooling"}, `{"data":{"x":1}}`, None, nil, 0, 0, 1},
		{scored{pooled{name: "rerank"}}, `{"query":"who is it, the boss?","documents":["it is I","nobody"]}`, Text, blocksOf([]byte("who is it, the boss?")), 2*20 + 20, 0, 1},
		{scored{pooled{name: "rerank"}}, `{"query":{"text":"who is it, the boss?"},"documents":["x"]}`, Text, blocksOf([]byte("who is it, the boss?")), 20 + 5, 0, 1},
		{scored{pooled{name: "score"}}, `{"text_1":["who is it, the boss?"],"data_2":"I"}`, Text, blocksOf([]byte("who is it, the boss?")), 20 + 3, 0, 1},
		{scored{pooled{name: "score"}}, `{"query":[1,2,3,4],"items":[[5,6],[7]],"label_token_ids":[1]}`, Text, nil, 11, 0, 1},
		{scored{pooled{name: "score"}}, `{"query":"x"}`, None, nil, 0, 0, 1},
		{scored{pooled{name: "score"}}, `{"query":"x","items":[]}`, None, nil, 0, 0, 1},
		{countTokens{}, askMessages, None, nil, 0, 0, 1},
		{messages{}, `{"system":"x","messages":[]}`, None, nil, 0, 0, 1},
		{responses{}, `{"input":{}}`, None, nil, 0, 0, 1},
	} {
		r := mustParse(t, c.api, c.body)
		if r.Kind != c.kind || !slices.Equal(r.Blocks, c.blocks) || r.Bytes != c.bytes || r.Tokens != c.tokens || r.prompts != c.prompts {
			t.Errorf("%s %s: kind %d, %x, want %x, %d bytes, %d tokens, %d prompts", c.api.Name(), c.body, r.Kind, r.Blocks, c.blocks, r.Bytes, r.Tokens, r.prompts)
		}
		if c.api.Work() != Generate && r.Stream {
			t.Errorf("%s: streamed", c.api.Name())
		}
	}
	if r := mustParse(t, pooled{name: "embeddings"}, `{"input":"x","stream":true}`); r.Stream {
		t.Error("an embedding is streamed")
	}
	for body, want := range map[string]int64{
		`{"text":"x","sampling_params":{"max_new_tokens":7,"n":3}}`:   7,
		`{"text":"x","sampling_params":[{"max_new_tokens":7,"n":3}]}`: 7,
	} {
		if r := mustParse(t, generate{}, body); r.MaxTokens != want || r.Choices != 3 {
			t.Errorf("%s: %d, %d", body, r.MaxTokens, r.Choices)
		}
	}
	if r := mustParse(t, responses{}, `{"input":"x","max_output_tokens":7}`); r.MaxTokens != 7 {
		t.Errorf("%d", r.MaxTokens)
	}
}

func TestErrorShapes(t *testing.T) {
	for _, c := range []struct {
		api    API
		status int
		param  string
		want   string
	}{
		{nil, 400, "nvext", `{"error":{"message":"no \"x\"","type":"invalid_request_error","param":"nvext","code":"c"}}`},
		{chat{}, 404, "", `{"error":{"message":"no \"x\"","type":"invalid_request_error","param":null,"code":"c"}}`},
		{responses{}, 429, "", `{"error":{"message":"no \"x\"","type":"rate_limit_error","param":null,"code":"c"}}`},
		{pooled{name: "embeddings"}, 503, "", `{"error":{"message":"no \"x\"","type":"server_error","param":null,"code":"c"}}`},
		{generate{}, 401, "", `{"error":{"message":"no \"x\"","type":"authentication_error","param":null,"code":"c"}}`},
		{chat{}, 403, "", `{"error":{"message":"no \"x\"","type":"permission_error","param":null,"code":"c"}}`},
	} {
		if got := string(ErrorBody(c.api, c.status, "c", `no "x"`, c.param)); got != c.want {
			t.Errorf("%s", got)
		}
	}
	for status, want := range map[int]string{
		400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
		422: "invalid_request_error", 429: "rate_limit_error", 500: "api_error", 502: "api_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
	} {
		var got struct {
			Type  string
			Error struct{ Type, Message, Code string }
		}
		if err := json.Unmarshal(ErrorBody(messages{}, status, "c", "m", ""), &got); err != nil {
			t.Fatal(err)
		}
		if got.Type != "error" || got.Error.Type != want || got.Error.Message != "m" || got.Error.Code != "c" {
			t.Errorf("%d: %+v", status, got)
		}
	}
}

// The last event of a broken stream must be read as a failure by the observer
// of the same API.
func TestBrokenEvents(t *testing.T) {
	for _, a := range append(slices.Clone(every), nil) {
		e := BrokenEvent(a)
		data := e[strings.Index(e, "data: ")+6:]
		if !strings.HasSuffix(e, "}\n\n") || strings.Contains(e, "DONE") || !json.Valid([]byte(data)) || !strings.Contains(e, `"code":"stream_broken"`) {
			t.Errorf("%q", e)
		}
		if a == nil || a.Work() == Count {
			continue
		}
		n := answered(mustParse(t, a, `{}`), true, 0, e)
		if n.ErrorStatus() != 500 || !n.Closed() {
			t.Errorf("%s: failed with %d, closed %v", a.Name(), n.ErrorStatus(), n.Closed())
		}
	}
}

// An error answer as an event must have the status for the observer of the same API.
func TestErrorEvents(t *testing.T) {
	for _, a := range every {
		if a.Work() == Count {
			continue
		}
		for body, status := range map[string]int{
			string(ErrorBody(a, 400, "invalid", "no", "")):                          400,
			string(ErrorBody(a, 503, "queue_timeout", "no", "")):                    500,
			`{"object":"error","message":"no","type":"BadRequestError","code":400}`: 400,
			"{\n  \"error\": {\r\n \"message\": \"no\", \"code\": 429}\n}":          429,
			`{"detail":"Not Found"}`:                                                418,
			"":                                                                      418,
			"<html>no\r\n\r\n":                                                      418,
		} {
			n := answered(mustParse(t, a, `{}`), true, 0, ErrorEvent(a, 418, []byte(body)))
			if n.ErrorStatus() != status || !n.Closed() {
				t.Errorf("%s: %q: failed with %d, closed %v", a.Name(), ErrorEvent(a, 418, []byte(body)), n.ErrorStatus(), n.Closed())
			}
		}
	}
}

func FuzzErrorEvent(f *testing.F) {
	f.Add([]byte(`{"error":{"message":"no","code":400}}`))
	f.Add([]byte("{\"message\":\n\"no\"}"))
	f.Add([]byte("no\n\ndata: x\xff"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		for _, a := range []API{nil, chat{}, responses{}, messages{}} {
			e := ErrorEvent(a, 500, answer)
			data, ok := strings.CutSuffix(strings.TrimPrefix(e, "event: error\n"), "\n\n")
			if data, is := strings.CutPrefix(data, "data: "); !ok || !is || strings.ContainsAny(data, "\r\n") || !json.Valid([]byte(data)) {
				t.Errorf("%q", e)
			}
		}
	})
}
