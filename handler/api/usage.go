package api

// AskUsage returns the change of a body by which the engine is asked to report
// usage at the end of its stream: "include_usage":true is put into
// stream_options, which is made if the body has none or null. It is not ok if
// nothing is to be asked: no stream, an API whose streams have their usage
// anyway, or a client that asks itself. That is also one that has a
// stream_options without a word of include_usage, which vLLM takes for a yes,
// or asks for usage in each chunk. Otherwise the answer has one chunk that the
// client did not ask for: take it out with a UsageFilter. The body must be the
// one that was parsed.
func (r *Request) AskUsage(body []byte) (e Edit, ok bool) {
	at, text := r.usageEdit(body)
	return Edit{Span{at.start, at.end}, []byte(text)}, text != ""
}

// usageEdit returns what AskUsage puts in the place of what; nothing for
// nothing.
func (r *Request) usageEdit(b []byte) (at span, text string) {
	const ask = `"include_usage":true`
	switch r.API.(type) {
	case chat, completions:
	default:
		return at, ""
	}
	if !r.Stream || len(b) != r.size {
		return at, ""
	}
	v := r.options
	switch {
	case v.end == 0:
		// There is another member, stream, for the comma.
		return span{r.brace + 1, r.brace + 1}, `"stream_options":{` + ask + `},`
	case isNull(v.of(b)):
		return v, `{` + ask + `}`
	case v.first(b) != '{':
		return at, "" // the engine will say what is wrong with it
	}
	if each := member(b, v, "continuous_usage_stats"); each.end > 0 && !isNo(each.of(b)) {
		return at, ""
	}
	if had := member(b, v, "include_usage"); had.end > 0 && isNo(had.of(b)) {
		return had, "true"
	}
	return at, ""
}
