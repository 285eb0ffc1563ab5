package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// Unplanned reads bodies of requests that belong to no API of For: their model,
// what they say to a router, and no prompt. Its errors have OpenAI's shape.
var Unplanned API = unplanned{}

type unplanned struct{}

func (unplanned) Name() string                    { return "" }
func (unplanned) Work() Work                      { return Count }
func (unplanned) shape() shape                    { return shapeOpenAI }
func (unplanned) prompt(*parse)                   {}
func (unplanned) begin(*Answer)                   {}
func (unplanned) event(*Answer, []byte, int) bool { return true }

// field looks for what steers an engine in the parameters, too, where SGLang's
// /vertex_generate has it.
func (unplanned) field(p *parse, key []byte, v rawjson.Span) {
	if string(key) != "parameters" || v.First(p.body) != '{' {
		return
	}
	c := rawjson.Enter(p.body, v.Start)
	for c.Next() {
		p.req.Steers = p.req.Steers || steers(c.Key())
		c.Value()
	}
}
