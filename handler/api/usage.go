package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// AskUsage returns the change of a body by which the engine is asked to report
// usage at the end of its stream: "include_usage":true is put into
// stream_options, which is made if the body has none or null. It is not ok if
// nothing is to be asked: no stream, an API whose streams have their usage
// anyway, or a client that asks itself. That is also one that has a
// stream_options without a word of include_usage, which vLLM takes for a yes,
// or asks for usage in each chunk. Otherwise the answer has one chunk that the
// client did not ask for: take it out with a UsageFilter. The body must be the
// one that was parsed.
func (r *Request) AskUsage(body []byte) (e rawjson.Edit, ok bool) {
	const ask = `"include_usage":true`
	switch r.API.(type) {
	case chat, completions:
	default:
		return e, false
	}
	if !r.Stream || len(body) != r.size {
		return e, false
	}
	v := r.options
	switch v.First(body) {
	case 0:
		// There is another member, stream, for the comma.
		at := rawjson.Span{Start: r.brace + 1, End: r.brace + 1}
		return rawjson.Edit{Span: at, Text: []byte(`"stream_options":{` + ask + `},`)}, true
	case '{':
	default: // null, or something that the engine will refuse
		return rawjson.Edit{Span: v, Text: []byte(`{` + ask + `}`)}, v.IsNull(body)
	}
	if each := v.Get(body, "continuous_usage_stats"); each.Len() > 0 && !isNo(each.Of(body)) {
		return e, false
	}
	had := v.Get(body, "include_usage")
	return rawjson.Edit{Span: had, Text: []byte("true")}, isNo(had.Of(body))
}
