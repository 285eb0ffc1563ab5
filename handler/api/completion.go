package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// completion is llama.cpp's /completion. Its prompt is that of completions.
type completion struct{ base }

func (completion) Name() string { return NameCompletion }

func (completion) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "prompt":
		p.main = v
	case "n_predict":
		p.limit(&p.req.MaxTokens, v)
	}
}

func (completion) prompt(p *parse) { p.input(p.main) }

// event reads a piece of the answer or the whole. The last one has "stop":true and the timings.
func (completion) event(a *Answer, b []byte, i int) bool {
	var content, stop, timings, fail, ids, predicted rawjson.Span
	if b[i] != '{' || rawjson.ReadAt(b, i, rawjson.To("content", &content), rawjson.To("stop", &stop),
		rawjson.To("timings", &timings), rawjson.To("error", &fail),
		rawjson.To("tokens", &ids), rawjson.To("tokens_predicted", &predicted)) < 0 {
		return false
	}
	a.fault(b, i, fail, rawjson.Span{})
	if raw, ok := content.Str(b); ok {
		a.text(raw)
	}
	n, ended := int64(unknown), string(stop.Of(b)) == "true"
	count(&n, b, predicted)
	a.ids.grow(b, ids, n, ended)
	if ended {
		a.finished++
		a.done = true
		a.timings(b, timings)
	}
	return true
}
