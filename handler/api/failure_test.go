package api

import (
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

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
