package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// AskUsage returns the edit that asks the engine for usage at the end of its
// stream. It sets "include_usage":true in stream_options, which it adds if the
// body has none or null. The answer then has one chunk that the client did not
// ask for: see UsageIn. There is nothing to ask (ok is false) if
//   - the body is no stream, or the API's streams always report usage,
//   - the client asks itself: also with stream_options that omit include_usage,
//     which vLLM takes for true, or with usage in each chunk.
//
// The body must be the one that was parsed.
func (r *Request) AskUsage(body []byte) (e rawjson.Edit, ok bool) {
	const ask = `"include_usage":true`
	if !r.API.traits().asksUsage || !r.Stream || len(body) != r.size {
		return e, false
	}
	v := r.options
	switch v.First(body) {
	case 0: // the member stream follows the comma
		at := rawjson.Span{Start: r.brace + 1, End: r.brace + 1}
		return rawjson.Edit{Span: at, Text: []byte(`"stream_options":{` + ask + `},`)}, true
	case '{':
	default: // null, or something that the engine refuses
		return rawjson.Edit{Span: v, Text: []byte(`{` + ask + `}`)}, v.IsNull(body)
	}
	if each := v.Get(body, "continuous_usage_stats"); each.Len() > 0 && !isNo(each.Of(body)) {
		return e, false
	}
	had := v.Get(body, "include_usage")
	return rawjson.Edit{Span: had, Text: []byte("true")}, isNo(had.Of(body))
}

// UsageIn finds the usage that AskUsage asked for in an event's data: an object
// with a usage, an empty list of choices, and no error. With all, the data holds
// nothing else. Otherwise cut is the part to cut out: llama.cpp reports its timings
// in the same chunk. For other data, cut is the zero Span.
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
			// Most chunks end the search here.
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

// usage reads a usage object, or SGLang's meta_info. Some engines repeat it in
// each chunk: a count that a later one omits stays.
func (a *Answer) usage(b []byte, v rawjson.Span) {
	var prompt, completion, details rawjson.Span
	v.Read(b, rawjson.To("prompt_tokens", &prompt), rawjson.To("input_tokens", &prompt),
		rawjson.To("completion_tokens", &completion), rawjson.To("output_tokens", &completion),
		rawjson.To("prompt_tokens_details", &details), rawjson.To("input_tokens_details", &details))
	count(&a.prompt, b, prompt)
	count(&a.completion, b, completion)
	count(&a.cached, b, details.Get(b, "cached_tokens"))
}

func count(to *int64, b []byte, v rawjson.Span) {
	if n, ok := integer(v.Of(b)); ok && n >= 0 {
		*to = n
	}
}
