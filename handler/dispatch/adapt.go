package dispatch

import (
	"maps"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// adapted returns the request of an attempt, and what is sent of its body, in
// the words of the engine that it goes to: another attempt may go to one of
// another type. Where nothing is to be said, both are as they are.
func (rt *Dispatch) adapted(req *http.Request, whole *body.Replay) (*http.Request, body.Edited) {
	var as body.Edited
	if whole != nil {
		as = body.Edited{Of: whole, Size: whole.Size}
	}
	a, p := rt.attempt, rt.plan
	ranks := a.Worker.Ranks()
	if ranks < 2 && !p.EditsBody && !p.AsksUsage {
		return req, as
	}
	var edit *api.Editor
	if read := p.Parsed(); read != nil && whole != nil {
		edit = read.Editor(whole.Parts[0])
	}
	e := rt.Pool.EngineOf(a.Worker)
	say := engine.Request{
		Body: edit, Ext: p.Ext, Grants: p.Grants, Salt: p.Salt(), Sent: req.Header,
		Rank: a.Target.Rank, Ranks: ranks, GiveTokens: p.Given,
	}
	if p.API != nil {
		say.API = p.API.Name()
	} else {
		say.API = engine.PostTo(req.URL.Path)
	}
	said := e.Adapt(&say)
	if p.Computes {
		rt.lacks(e.Type, said.Lacks)
	}
	rt.noticeCut(said.Dropped)
	if edit != nil {
		if p.AsksUsage {
			edit.Replace(p.AskUsage)
		}
		as = whole.Edit(edit.Edits())
	}
	return withHeaders(req, said.Headers), as
}

// withHeaders returns a request with other headers. The attempts of a request
// share theirs.
func withHeaders(req *http.Request, headers []engine.Header) *http.Request {
	if len(headers) == 0 {
		return req
	}
	out := *req
	out.Header = maps.Clone(req.Header)
	for _, h := range headers {
		if !h.Default || len(out.Header[h.Name]) == 0 {
			out.Header[h.Name] = []string{h.Value}
		}
	}
	return &out
}

// lacks takes in what of a client's nvext an engine has nothing for.
func (rt *Dispatch) lacks(kind string, fields engine.Fields) {
	if fields == 0 {
		return
	}
	if kind == "" {
		kind = engine.Other
	}
	for name := range fields.Names {
		rt.Metrics.unsupported.WithLabelValues(rt.Pool.Name, kind, name).Inc()
	}
	rt.Pool.Incidents.Raise(time.Now(), "nvext that the engine does not take", rt.Pool.Logger)
}
