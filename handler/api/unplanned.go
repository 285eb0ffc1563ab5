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

// field recognizes Vertex AI's form, as SGLang's /vertex_generate takes it.
func (unplanned) field(p *parse, key []byte, _ rawjson.Span) {
	p.req.Vertex = p.req.Vertex || string(key) == "instances"
}
