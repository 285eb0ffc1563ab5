package api

import (
	"bytes"
	"cmp"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// vllmStream is what vLLM sends, with usage in each chunk and llama.cpp's
// pings and progress between.
const vllmStream = `: ping

data: {"id":"chatcmpl-r","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}

data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"prompt_progress":{"total":9,"cache":0,"processed":4,"time_ms":3}}

data: {"id":"chatcmpl-r","choices":[{"index":0,"delta":{"content":"Hello, how are"},"finish_reason":null}],"usage":{"prompt_tokens":20,"completion_tokens":1}}

data: {"id":"chatcmpl-r","choices":[{"index":0,"delta":{"content":" you today?"},"finish_reason":"stop","stop_reason":null}]}

data: {"id":"chatcmpl-r","choices":[],"usage":{"prompt_tokens":20,"total_tokens":25,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":16,"created_cache_tokens":null}}}

data: [DONE]

`

const askHello = `{"messages":[{"role":"user","content":"say hello"}]}`

func TestStreamStepByStep(t *testing.T) {
	a := observe(mustParse(t, chat{}, askHello), true)
	var chunks []int
	for _, e := range strings.SplitAfter(vllmStream, "\n\n") {
		a.Write([]byte(e))
		chunks = append(chunks, a.Chunks())
		if a.FirstToken() != (a.Chunks() > 0) || a.Closed() != (len(chunks) > 6) {
			t.Errorf("after %d events: first token %v, %d chunks, closed %v", len(chunks), a.FirstToken(), a.Chunks(), a.Closed())
		}
	}
	if want := []int{0, 0, 0, 1, 2, 2, 2, 2}; !slices.Equal(chunks, want) {
		t.Errorf("chunks %v, want %v", chunks, want)
	}
	a.Finish()
	if p, c, k := a.Usage(); p != 20 || c != 5 || k != 16 {
		t.Errorf("usage %d %d %d", p, c, k)
	}
	want := mustParse(t, chat{}, `{"messages":[{"role":"user","content":"say hello"},{"role":"assistant","content":"Hello, how are you today?"}]}`).Blocks
	if !a.Done() || a.Failed() || !slices.Equal(a.Prediction(), want) {
		t.Errorf("done %v failed %v prediction %x want %x", a.Done(), a.Failed(), a.Prediction(), want)
	}
}

func delta(d string) string { return `{"choices":[{"index":0,"delta":` + d + `}]}` }

const stop = `{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`

func TestNoPrediction(t *testing.T) {
	toolA := delta(`{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":"{"}}]}`)
	for name, c := range map[string]struct {
		request                     string
		events                      []string
		prediction, done, failed, _ bool
	}{
		"ok":                  {events: []string{delta(`{"content":"hi"}`), stop}, prediction: true, done: true},
		"done mark only":      {events: []string{delta(`{"content":"hi"}`), "[DONE]"}, prediction: true, done: true},
		"unfinished":          {events: []string{delta(`{"content":"hi"}`)}},
		"reasoning_content":   {events: []string{delta(`{"reasoning_content":"hm"}`), delta(`{"content":"hi"}`), stop}, done: true},
		"reasoning":           {events: []string{delta(`{"reasoning":"hm"}`), stop}, done: true},
		"empty reasoning":     {events: []string{delta(`{"reasoning":"","content":"hi"}`), stop}, prediction: true, done: true},
		"think":               {events: []string{delta(`{"content":"\n <th"}`), delta(`{"content":"in\u006b>hm"}`), stop}, done: true},
		"late think":          {events: []string{delta(`{"content":"a <think> b"}`), stop}, prediction: true, done: true},
		"think end":           {events: []string{delta(`{"content":"hm<<\/th"}`), delta(`{"content":"ink>hi"}`), stop}, done: true},
		"n":                   {request: `{"n":2,"messages":[{"role":"user","content":"x"}]}`, events: []string{delta(`{"content":"hi"}`), stop}},
		"n done":              {request: `{"n":2,"messages":[{"role":"user","content":"x"}]}`, events: []string{stop, stop}, done: true},
		"best_of":             {request: `{"best_of":2,"messages":[{"role":"user","content":"x"}]}`, events: []string{stop}, done: true},
		"second choice":       {events: []string{`{"choices":[{"delta":{"content":"hi"},"index":1}]}`, stop}, done: true},
		"continued":           {request: `{"continue_final_message":true,"messages":[{"role":"user","content":"x"}]}`, events: []string{stop}, done: true},
		"error":               {events: []string{delta(`{"content":"hi"}`), `{"error":{"message":"x"}}`, "[DONE]"}, done: true, failed: true},
		"flat error":          {events: []string{`{"object":"error","message":"x"}`, "[DONE]"}, done: true, failed: true},
		"null error":          {events: []string{`{"error":null,"choices":[]}`, stop}, prediction: true, done: true},
		"abort":               {events: []string{`{"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}`}, done: true, failed: true},
		"tool":                {events: []string{toolA, delta(`{"tool_calls":[{"index":0,"function":{"arguments":"}"}}]}`), stop}, prediction: true, done: true},
		"text after a tool":   {events: []string{toolA, delta(`{"content":"hi"}`), stop}, done: true},
		"tools interleaved":   {events: []string{toolA, delta(`{"tool_calls":[{"index":1,"function":{"name":"g"}}]}`), toolA, stop}, done: true},
		"tool without a name": {events: []string{delta(`{"tool_calls":[{"index":0,"function":{"arguments":"}"}}]}`), stop}, done: true},
		"tool named twice":    {events: []string{toolA, toolA, stop}, done: true},
		"function call":       {events: []string{delta(`{"function_call":{"name":"g","arguments":""}}`), stop}, done: true},
		"other role":          {events: []string{delta(`{"role":"tool","content":"x"}`), stop}, done: true},
		"refusal":             {events: []string{delta(`{"refusal":"no"}`), stop}, done: true},
		"broken event":        {events: []string{`{"choices":[{"index":0,"delta":{"content":"x"`, stop}, done: true},
		"no JSON":             {events: []string{`oops`, stop}, done: true},
		"too long":            {events: []string{`{"x":"` + strings.Repeat("x", rawjson.MaxFrame) + `"}`, stop}, done: true},
	} {
		a := answerOf(t, chat{}, cmp.Or(c.request, askHello), true, c.events...)
		if got := a.Prediction() != nil; got != c.prediction || a.Done() != c.done || a.Failed() != c.failed {
			t.Errorf("%s: prediction %v, done %v, failed %v", name, got, a.Done(), a.Failed())
		}
	}
}

func TestEndlessAnswerIsBounded(t *testing.T) {
	e := delta(`{"content":"` + strings.Repeat("x", 1<<18) + `"}`)
	a := answerOf(t, chat{}, askHello, true, append(slices.Repeat([]string{e}, 20), stop)...)
	if a.Prediction() != nil || a.hash.blocks != nil || a.Chunks() != 20 {
		t.Error("the answer's blocks grow without bound")
	}
}

// repeats are streams whose chunks differ in their text alone, or in more.
var repeats = func() (streams []string) {
	chunk := func(created, text, rest string) string {
		return `data: {"id":"c","created":` + created + `,"choices":[{"index":0,"delta":{"content":"` + text + `"}` + rest + `}]}` + "\n\n"
	}
	for _, chunks := range [][]string{
		{chunk("1", "a", ""), chunk("1", "b", ""), chunk("1", "c d", "")},
		{chunk("1", "a", ""), chunk("1", `b\n`, ""), chunk("1", `\"`, ""), chunk("1", `\\`, ""), chunk("1", "c", "")},
		{chunk("1", "a", ""), chunk("1", "", ""), chunk("1", "b", "")},
		{chunk("1", "a", ""), chunk("1", "b", `,"finish_reason":"stop"`), chunk("1", "c", `,"finish_reason":"stop"`)},
		{chunk("1", "a", ""), chunk("2", "b", ""), chunk("2", "c", ""), chunk("3", "d", "")},
		{chunk("1", "a", ""), chunk("1", `x","reasoning":"y`, ""), chunk("1", "b", "")},
		{chunk("1", "a", `}],"usage":{"prompt_tokens":1},"x":[{"y":1`), chunk("1", "b", `}],"usage":{"prompt_tokens":2},"x":[{"y":1`)},
		{chunk("1", "a", ""), chunk("1", "</thi", ""), chunk("1", "nk>", ""), chunk("1", "b", "")},
	} {
		for n := range len(chunks) + 1 { // each is compared after each chunk
			streams = append(streams, strings.Repeat(strings.Join(chunks, ""), 2)+strings.Join(chunks[:n], ""))
		}
	}
	return streams
}()

// TestRepeatIsTakenForOne: the short way is taken.
func TestRepeatIsTakenForOne(t *testing.T) {
	a := observe(mustParse(t, chat{}, askHello), true)
	a.Write([]byte(repeats[0]))
	if !a.again([]byte(`{"id":"c","created":1,"choices":[{"index":0,"delta":{"content":"z"}}]}`)) {
		t.Error("a repeat is not taken for one")
	}
}

func FuzzSSE(f *testing.F) {
	s := speller{rand.New(rand.NewPCG(7, 8))}
	for range 5 {
		f.Add(uint64(1), uint8(0), bytes.Join(s.stream(s.words(40), []jsonObject{{"function": jsonObject{"name": "f", "arguments": `{"a":1}`}}}), nil))
	}
	f.Add(uint64(2), uint8(0), []byte(vllmStream))
	for _, stream := range repeats {
		f.Add(uint64(5), uint8(0), []byte(stream))
		f.Add(uint64(5), uint8(0), []byte(stream+"data: "+stop+"\n\n"))
	}
	f.Add(uint64(3), uint8(1), []byte("\xEF\xBB\xBFdata: {\r\ndata: \"choices\":[{\"text\":\"x\"}]}\r\r\n\n:x\rdata"))
	requests := make([]*Request, len(every))
	for i, a := range every {
		requests[i] = mustParse(f, a, string(goldenFile(f, a.Name(), "request.json")))
		for _, name := range []string{"answer.json", "stream.txt"} {
			if b := goldenFile(f, a.Name(), name); b != nil {
				f.Add(uint64(4), uint8(i), b)
			}
		}
	}
	f.Fuzz(func(t *testing.T, seed uint64, which uint8, stream []byte) {
		r := requests[int(which)%len(requests)]
		one, many, slow := observe(r, true), observe(r, true), observe(r, true)
		slow.repeat.off = true
		slow.Write(stream)
		slow.Finish()
		one.Write(stream)
		for _, p := range (speller{rand.New(rand.NewPCG(seed, 9))}).reads(stream) {
			p = slices.Clone(p)
			many.Write(p)
			clear(p)
		}
		one.Finish()
		many.Finish()
		plain := answered(r, false, 0, string(stream))
		if plain.Chunks() > 1 {
			t.Fatalf("%d chunks in a plain answer", plain.Chunks())
		}
		predicted := slices.Clone(one.Prediction())
		if one.FirstToken() != slow.FirstToken() || one.Chunks() != slow.Chunks() || one.outcome != slow.outcome || !slices.Equal(predicted, slow.Prediction()) {
			t.Fatalf("repeats matter:\n%+v\n%+v", one, slow)
		}
		p1, c1, k1 := one.Usage()
		p2, c2, k2 := many.Usage()
		if one.FirstToken() != many.FirstToken() || one.Chunks() != many.Chunks() || one.Done() != many.Done() || one.Failed() != many.Failed() ||
			p1 != p2 || c1 != c2 || k1 != k2 || !slices.Equal(predicted, many.Prediction()) || (predicted == nil) != (many.Prediction() == nil) {
			t.Fatalf("the split matters:\n%+v\n%+v", one, many)
		}
	})
}

// TestParseableIsWhatItSaysItIs reads answers as what their content type would
// say, whatever they are.
func TestParseableIsWhatItSaysItIs(t *testing.T) {
	const page = "<!DOCTYPE html>\n<html><body>data center</body></html>\n"
	event := "data: " + stop + "\n\n"
	for name, v := range map[string]struct {
		stream bool
		body   string
		want   bool
	}{
		"a stream":                {true, event + "data: [DONE]\n\n", true},
		"[DONE] alone":            {true, "data: [DONE]\n\n", true},
		"a stream without an end": {true, "data: " + stop, true},
		"an error event":          {true, "data: {\"error\":{\"message\":\"x\"}}\n\n", true},
		"an error's name":         {true, "event: error\n\n", true},
		"garbage after an event":  {true, event + page, true},
		"an event too long":       {true, "data: {\"" + strings.Repeat("x", rawjson.MaxFrame) + "\"}\n\n", true},
		"JSON as a stream":        {true, stop, false},
		"many lines of JSON":      {true, "{\n\"choices\": [\n]\n}\n", false},
		"HTML as a stream":        {true, page, false},
		"comments alone":          {true, ": ping\n\n: ping\n\n", false},
		"an empty stream":         {true, "", false},
		"events without JSON":     {true, "data: Internal Server Error\n\n", false},
		"an event that is cut":    {true, "data: {\"choices\":[{\"index\":0,\n\n", false},

		"JSON":                {false, stop, true},
		"an error":            {false, `{"error":{"message":"x"}}`, true},
		"JSON of another":     {false, `[1, 2]`, true},
		"a JSON string":       {false, `"ok"`, true},
		"too long":            {false, `{"` + strings.Repeat("x", maxAnswer) + `"}`, true},
		"a stream as JSON":    {false, event, false},
		"HTML":                {false, page, false},
		"JSON that is cut":    {false, stop[:len(stop)-2], false},
		"nothing":             {false, "", false},
		"white space":         {false, " \n", false},
		"Python's idea of it": {false, `{'choices': []}`, false},
	} {
		for _, size := range []int{1, 7, 1 << 30} {
			if size == 1 && len(v.body) > 1<<16 {
				continue
			}
			a := observe(mustParse(t, chat{}, askHello), v.stream)
			for piece := range slices.Chunk([]byte(v.body), size) {
				a.Write(piece)
			}
			a.Finish()
			if a.Parseable() != v.want {
				t.Errorf("%s in pieces of %d: parseable %v", name, size, a.Parseable())
			}
		}
	}
}

// TestErrorStatus reads errors in the shapes of engines. 4xx is the request's fault, but for 408, 409
// and 429, and 499 an abort.
func TestErrorStatus(t *testing.T) {
	const long = "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens."
	openAI, anthropic, openResponses := []API{chat{}, completions{}, generate{}, tokensIn{}}, []API{messages{}}, []API{responses{}}
	for _, v := range []struct {
		apis []API
		data string
		want int
	}{
		{openAI, `{"error":{"message":"` + long + `","type":"BadRequestError","param":null,"code":400}}`, 400},
		{openAI, `{"error":{"object":"error","message":"The input is longer","type":"BadRequestError","code":"400"}}`, 400},
		{openAI, `{"object":"error","message":"x","type":"BadRequestError","param":null,"code":400}`, 400},
		{openAI, `{"object":"error","message":"x","type":"NotFoundError","param":null,"code":404}`, 404},
		{openAI, `{"error":{"message":"x","type":"BAD_REQUEST","code":null}}`, 400},
		{openAI, `{"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","param":null,"code":500}}`, 500},
		{openAI, `{"error":{"message":"x","type":"Internal Server Error","code":"500 Internal Server Error"}}`, 500},
		{openAI, `{"error":{"code":400,"message":"exceeds the available context size","type":"exceed_context_size_error"}}`, 400},
		{openAI, `{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}`, 503},
		{openAI, `{"error":{"message":"x","type":"UnprocessableEntityError"},"status":422}`, 422},
		{openAI, `{"error":{"message":"x","type":"TooManyRequests","code":429}}`, 429},
		{openAI, `{"error":{"message":"x","code":"408"}}`, 408},
		{openAI, `{"error":{"message":"x","code":409}}`, 409},
		{openAI, `{"error":"` + long + `"}`, 400},
		{openAI, `{"error":"x","error_type":"validation"}`, 400},
		{openAI, `{"error":"x","error_type":"generation"}`, 500},
		{openAI, `{"error":"x","code":400}`, 400},
		{openAI, `{"error":{"error":{"type":"invalid_request_error"}}}`, 400},
		{openAI, `{"error":{"message":"x","code":7,"status":"INVALID_ARGUMENT"}}`, 400},
		{openAI, `{"error":{"message":"x","type":"invalid_request_error","code":"context_length_exceeded"}}`, 400},
		{openAI, `{"error":{"message":"x","type":"requests","param":null,"code":"rate_limit_exceeded"}}`, 500},
		{openAI, `{"error":{"message":"x","type":"server_error","param":null,"code":"stream_broken"}}`, 500},
		{openAI, `{"error":{"message":"Generation aborted.","type":"INTERNAL_SERVER_ERROR","code":500}}`, StatusAborted},
		{openAI, `{"error":{"message":"The request is aborted by a higher priority request.","code":503}}`, StatusAborted},
		{openAI, `{"error":{"message":"Abort: the input is too long","type":"BadRequestError","code":400}}`, 400},
		{openAI, `{"error":{"message":"x","type":"AbortError"}}`, StatusAborted},
		{openAI, `{"error":null,"choices":[]}`, 0},
		{openAI[:2], `{"error":{"message":"x"}}`, 500},
		{openAI[:2], `{"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}`, StatusAborted},
		{openAI[:2], `{"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}`, 500},
		{[]API{generate{}}, `{"error":{"message":"The input is longer than the context"}}`, 400},
		{[]API{generate{}}, `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"x"}}}`, StatusAborted},
		{[]API{generate{}}, `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"x","status_code":400}}}`, 400},
		{[]API{generate{}}, `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"x","status_code":500}}}`, 500},
		{[]API{generate{}}, `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Aborted","status_code":500}}}`, StatusAborted},
		{anthropic, `{"type":"error","error":{"type":"invalid_request_error","message":"x"}}`, 400},
		{anthropic, `{"type":"error","error":{"type":"not_found_error","message":"x"}}`, 400},
		{anthropic, `{"type":"error","error":{"type":"request_too_large","message":"x"}}`, 400},
		{anthropic, `{"type":"error","error":{"type":"overloaded_error","message":"x"}}`, 500},
		{anthropic, `{"type":"error","error":{"type":"api_error","message":"Invalid state"}}`, 500},
		{anthropic, `{"error":{"message":"x","type":"BadRequestError","code":400}}`, 400},
		{openResponses, `{"type":"error","code":"invalid_prompt","message":"x","param":null}`, 400},
		{openResponses, `{"type":"error","code":"server_error","message":"x","param":null}`, 500},
		{openResponses, `{"type":"error","error":{"code":"context_length_exceeded","message":"x"}}`, 400},
		{openResponses, `{"type":"response.failed","response":{"status":"failed","error":{"code":"context_length_exceeded"}}}`, 400},
		{openResponses, `{"type":"response.failed","response":{"status":"failed","error":{"code":"server_error","message":"x"}}}`, 500},
		{openResponses, `{"type":"response.failed","response":{"status":"failed","error":null}}`, 500},
		{openResponses, `{"type":"response.incomplete","response":{"status":"incomplete","error":null,"output":[]}}`, 0},
		{openResponses, `{"type":"response.completed","response":{"status":"cancelled","error":null,"output":[]}}`, StatusAborted},
	} {
		for _, a := range v.apis {
			n := mustParse(t, a, `{"stream":true}`).NewAnswer(true)
			n.Event(rawjson.Frame{Data: []byte(v.data), Lines: 1})
			if n.ErrorStatus() != v.want {
				t.Errorf("%s: %s: %d, want %d", a.Name(), v.data, n.ErrorStatus(), v.want)
			}
		}
	}
	for data, want := range map[string]int{ // of an event that is named error, or of llama.cpp's field
		`{"code":400,"message":"x","type":"invalid_request_error"}`: 400,
		`{"code":500,"message":"x","type":"server_error"}`:          500,
		long:          400,
		`{"cut":`:     500,
		``:            500,
		`"no reason"`: 500,
	} {
		n := mustParse(t, chat{}, `{"stream":true}`).NewAnswer(true)
		if n.Event(rawjson.Frame{Data: []byte(data), Lines: 1, Failed: true}); n.ErrorStatus() != want || !n.Closed() {
			t.Errorf("%q: %d, want %d", data, n.ErrorStatus(), want)
		}
	}
}
