package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// AskUsage returns the change of a body by which the engine is asked to report
// usage at the end of its stream: "include_usage":true is put into
// stream_options, which is made if the body has none or null. It is not ok if
// nothing is to be asked: no stream, an API whose streams have their usage
// anyway, or a client that asks itself. That is also one that has a
// stream_options without a word of include_usage, which vLLM takes for a yes,
// or asks for usage in each chunk. Otherwise the answer has one chunk that the
// client did not ask for: see UsageIn. The body must be the
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

// UsageIn finds the usage that AskUsage asked for in an event's data: an object
// with a usage and an empty list of choices, and without an error. All tells
// that the data has nothing else to say. Otherwise cut is what is to be cut out
// of it, for llama.cpp says its timings there, too. It is the zero Span if the
// data is something else.
func UsageIn(data []byte) (cut rawjson.Span, all bool) {
	none := rawjson.Span{}
	c, _ := rawjson.Open(data)
	empty, first := false, false
	all = true
	for c.Next() {
		key, from := c.Key(), c.KeyAt
		if c.Comma >= 0 {
			from = c.Comma
		}
		at := c.At
		switch string(key) {
		case "choices":
			// most chunks are known from here
			if i := rawjson.SkipSpace(data, at+1); data[at] != '[' || i < len(data) && data[i] != ']' {
				return none, false
			}
			empty = true
			c.Value()
		case "usage":
			if data[at] != '{' {
				return none, false
			}
			cut, first = rawjson.Span{Start: from, End: c.Value().End}, c.Comma < 0
		case "id", "object", "created", "model", "system_fingerprint", "service_tier":
			c.Value()
		case "error":
			if !c.Value().IsNull(data) {
				return none, false
			}
		default:
			all = c.Value().IsNull(data) && all
		}
	}
	if !empty || cut == none || !c.Alone() {
		return none, false
	}
	if first { // the comma behind it goes
		cut.End = rawjson.SkipSpace(data, cut.End) + 1
	}
	return cut, all
}
