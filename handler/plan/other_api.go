package plan

import (
	"net/http"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// saysJSON returns whether a header declares the body as JSON.
func saysJSON(h http.Header) bool {
	kind := body.MediaType(h)
	return kind == "application/json" || strings.HasSuffix(kind, "+json")
}

// readOther plans a request for no known API whose body was read. It goes to the least
// loaded of the workers with its model.
func (p *Plan) readOther(r *http.Request, whole *body.Buffer) {
	p.Body, p.Repeatable, p.Score.Streamed = body.NewReplay(whole, whole.Data), idempotent(r.Method), true
	req, err := api.Parse(api.Unplanned, whole.Data, api.Options{})
	if err != nil || req.Vertex {
		p.cannotParse(fallbackMalformed)
		p.Model = strings.Clone(api.Model(whole.Data))
		return
	}
	detach(req)
	p.Model, p.other = req.Model, req
	p.EditsBody = req.NVExt != nil || req.NullNVExt
}

// takeOther returns the nvext of a request for no known API, and releases it.
func (p *Plan) takeOther() (raw []byte) {
	if p.other != nil {
		raw, p.other.NVExt = p.other.NVExt, nil
	}
	return raw
}

// infersUnplanned returns whether some engine computes something for a request at this
// path, which belongs to no known API.
func infersUnplanned(r *http.Request) bool {
	return posts(r.Method) && api.For(r.URL.Path) == nil && engine.Infers(r.URL.Path)
}

// OrUnplanned returns an API for the shape of its errors.
func OrUnplanned(a api.API) api.API {
	if a == nil {
		return api.Unplanned
	}
	return a
}
