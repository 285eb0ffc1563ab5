package api

import (
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// LacksUsage returns whether the engine does not report usage at the end of its
// stream unless AskUsage asks for it. It returns false if
//   - the body is no stream, or the API's streams always report usage,
//   - the client asks itself: also with stream_options that omit include_usage,
//     which vLLM takes for true, or with usage in each chunk.
//
// The body must be the one that was parsed.
func (r *Request) LacksUsage(body []byte) bool {
	v := r.options
	switch {
	case !r.API.traits().asksUsage || !r.Stream || len(body) != r.size:
		return false
	case v.First(body) != '{': // with null, or something that the engine refuses
		return v.End == 0 || v.IsNull(body)
	}
	each := v.Get(body, "continuous_usage_stats")
	return isNo(v.Get(body, nameUsage).Of(body)) && (each.End == 0 || isNo(each.Of(body)))
}

const nameUsage = "include_usage"

// AskUsage asks the engine for usage at the end of its stream, if the request LacksUsage. The
// answer then has one chunk that the client did not ask for: see CutUsage.
func (r *Request) AskUsage(e *rawjson.Editor) {
	if r.options.End == 0 { // the member stream follows the comma
		at := rawjson.Span{Start: r.brace + 1, End: r.brace + 1}
		e.Replace(rawjson.Edit{Span: at, Text: []byte(`"stream_options":{"` + nameUsage + `":true},`)})
	} else if in, ok := e.Object("stream_options"); ok {
		in.Set(nameUsage, []byte("true"))
	}
}

// CutUsage appends the edits that take the usage that AskUsage asked for out of an event's data.
// Such data are an object with a usage, an empty list of choices, and no error. With all, they hold
// nothing else. Otherwise llama.cpp reports its timings in the same chunk.
func CutUsage(edits []rawjson.Edit, data []byte) (_ []rawjson.Edit, all bool) {
	var choices, usage rawjson.Span
	event := rawjson.Document(data)
	all = true
	for key, v := range event.Members(data) {
		switch string(key) {
		case "choices":
			if choices = v; v.HasContent(data) {
				return edits, false // most chunks end the search here
			}
		case "usage":
			usage = v
		case "id", "object", "created", "model", "system_fingerprint", "service_tier":
		case "error":
			if !v.IsNull(data) {
				return edits, false
			}
		default:
			all = v.IsNull(data) && all
		}
	}
	if choices.First(data) != '[' || usage.First(data) != '{' || !gjson.ValidBytes(data) {
		return edits, false
	}
	if e := rawjson.EditAt(data, event.Start, maxMembers); e != nil {
		e.Cut("usage")
		edits = append(edits, e.Edits()...)
	}
	return edits, all
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
