package attempt

import (
	"cmp"
	"net/http"
	"net/url"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// ModelAt returns the name by which a worker gets the request's model. If it differs from the client's, the request
// is changed for the worker, and the answer for the client.
func ModelAt(p *plan.Plan, w *worker.Worker) string { return cmp.Or(w.ModelName(), p.Model) }

// Renames returns whether a worker gets another name of the model than the client uses.
func Renames(p *plan.Plan, w *worker.Worker) bool { return !p.Everywhere && ModelAt(p, w) != p.Named() }

// PublicName returns the name of the model that the answer must carry in place of the engine's; empty if it is the
// same.
func (a *Attempt) PublicName() string {
	if p := a.Call.Plan; Renames(p, a.Worker) {
		return p.Named()
	}
	return ""
}

const memberModel = "model"

// SetModel replaces the client's name of the model in a body by the worker's.
func SetModel(edit *api.Editor, p *plan.Plan, w *worker.Worker) {
	v := edit.Value(memberModel)
	if text := (rawjson.Span{End: len(v)}).Text(v); text != "" && text == p.Named() || v == nil && p.API != nil && p.Named() == "" {
		edit.Set(memberModel, rawjson.AppendString(nil, ModelAt(p, w)))
	}
}

// setOnlyModel does what SetModel does for a body that does not change otherwise, without an Editor. It returns false if
// it cannot.
func (e *Request) setOnlyModel(as *body.Edited, read *api.Request) bool {
	v, ok := read.Only(e.Body.Data, memberModel)
	if !ok || v.Text(e.Body.Data) != e.Plan.Named() {
		return false
	}
	name := rawjson.AppendString(nil, ModelAt(e.Plan, e.Worker))
	*as = e.Body.Edit([]rawjson.Edit{{Span: v, Text: name}})
	return true
}

// renamed returns a request whose URL has another name of the model.
func renamed(req *http.Request, from, to string) *http.Request {
	path, query := plan.NameInPath(req.URL.Path, from), plan.NameInPairs(req.URL.RawQuery)
	if value, err := url.QueryUnescape(req.URL.RawQuery[query.Start:query.End]); err != nil || value != from || from == "" {
		query = rawjson.Span{}
	}
	if path.Len() == 0 && query.Len() == 0 {
		return req
	}
	out, u := *req, *req.URL
	if out.URL = &u; query.Len() > 0 {
		u.RawQuery = splice(u.RawQuery, query, url.QueryEscape(to))
	}
	if path.Len() > 0 {
		u.Path = splice(u.Path, path, to)
		if raw := plan.NameInPath(u.RawPath, url.PathEscape(from)); raw.Len() > 0 {
			u.RawPath = splice(u.RawPath, raw, url.PathEscape(to))
		}
	}
	return &out
}

func splice(s string, at rawjson.Span, text string) string { return s[:at.Start] + text + s[at.End:] }
