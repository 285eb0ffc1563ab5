package attempt

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Request builds a planned request as the engine of one worker gets it.
type Request struct {
	Plan    *plan.Plan
	Body    *body.Replay // nil if it is not in memory
	Worker  *worker.Worker
	Target  kvscore.Target
	Session string        // the engine's id of the request's session; empty if it holds none
	Phase   *engine.Phase // the part of the request that the worker serves; nil: the whole request

	Shared bool      // an attempt before may still be writing the header
	Rest   *api.Rest // of an answer, that the engine gives; nil for the whole one
	AskIDs bool      // the stream may go on elsewhere by the ids of its tokens

	// What Build has done.
	Did
	resends atomic.Int32 // how often net/http has sent the request again
}

// Did is what was done to a request for its engine.
type Did struct {
	Engine      string        // the engine's type; empty if nothing was done
	Unsupported engine.Fields // the client's nvext fields that the engine does not support
	CutIDs      bool          // the router has asked for ids, which the client does not get
	Cut         nvext.Grants  // that were missing for members cut out of the body
}

var errResent = errors.New("kv_router: the request was already resent once")

// Build returns the request for the engine, with the body from its first byte.
func (e *Request) Build(req *http.Request) *http.Request {
	fit, send := e.adapt(req)
	if e.Body == nil {
		return fit
	}
	out := *fit
	if e.Shared {
		out.Header = maps.Clone(out.Header)
	}
	if readsAnswer(e.Plan, e.Worker) || e.Plan.Makes() {
		out.Header.Set("Accept-Encoding", "identity")
	}
	if e.Body.Size == 0 || req.Body == nil { // the operator's `method GET` has the proxy drop the body
		return &out
	}
	out.Body, out.ContentLength = send.Open(), send.Size
	if req.ContentLength < 0 {
		out.ContentLength = -1 // the client sent it in chunks
	}
	// Engines close idle connections when they please. net/http repeats such a request if
	// it has GetBody and is idempotent. A header without values marks it so, and is not sent.
	// Two engines that get a phase at once must not get it twice.
	once := e.Phase != nil && e.Worker.Engine().Phases().Concurrent
	if _, set := out.Header["Idempotency-Key"]; !set && e.Plan.API != nil && !once {
		out.Header["Idempotency-Key"] = []string{}
	}
	out.GetBody = func() (io.ReadCloser, error) {
		if e.resends.Add(1) > 1 {
			e.resends.Add(-1)
			return nil, errResent
		}
		return send.Open(), nil
	}
	return &out
}

// readsAnswer returns whether the router reads the answer as it passes. It must not be
// compressed then.
func readsAnswer(p *plan.Plan, w *worker.Worker) bool {
	return p.Request != nil || p.Lists || p.Everywhere || Renames(p, w)
}

// adapt returns the request and its body, adapted to the engine.
func (e *Request) adapt(req *http.Request) (*http.Request, body.Edited) {
	var as body.Edited
	if e.Body != nil {
		as = body.Edited{Of: e.Body, Size: e.Body.Size}
	}
	p, ranks, renames, backup := e.Plan, e.Worker.Ranks(), Renames(e.Plan, e.Worker), e.Worker.IsBackup()
	adapts := ranks > 1 || p.EditsBody || p.AsksUsage || e.Session != "" || e.Phase != nil || e.Rest != nil || e.AskIDs || backup
	if p.Everywhere || !adapts && !renames {
		return req, as
	}
	var edit *api.Editor
	if read := p.Parsed(); read != nil && e.Body != nil && (adapts || !e.setOnlyModel(&as, read)) {
		edit = read.Editor(e.Body.Data)
	}
	var done engine.Adapted
	to, kind := e.Worker.Engine(), engine.PostTo(req.URL.Path)
	if p.API != nil {
		kind = p.API.Name()
	}
	if adapts {
		done = to.Adapt(&engine.Request{
			API: kind, Body: edit, Ext: p.Ext, Grants: p.Grants, Salt: p.Salt(), Sent: req.Header,
			Rank: e.Target.Rank, Ranks: ranks, GiveTokens: p.Given, Session: e.Session, Phase: e.Phase,
		})
		e.Engine, e.Unsupported, e.Cut = to.Type, done.Unsupported, done.Dropped
	}
	if edit != nil && backup {
		editForBackup(edit)
	}
	if renames {
		name := ModelAt(p, e.Worker)
		if req = renamed(req, p.Named(), name); edit != nil {
			SetModel(edit, p, e.Worker)
		} else if e.Body != nil && p.Form.Len() > 0 {
			as = e.Body.Edit([]rawjson.Edit{{Span: p.Form, Text: []byte(name)}})
		}
	}
	if edit != nil {
		if e.Rest != nil {
			to.Continue(edit, kind, e.Rest)
		}
		if e.AskIDs && to.ReturnsIDs(kind) && (e.Phase == nil || !e.Phase.Prefill) && !api.AsksIDs(edit) {
			api.AskIDs(edit)
			e.CutIDs = true
		}
		if p.AsksUsage && (e.Phase == nil || !e.Phase.Prefill) {
			edit.Replace(p.AskUsage)
		}
		as = e.Body.Edit(edit.Edits())
	}
	return withHeaders(req, done.Headers), as
}

// withHeaders returns a request with other headers. The attempts of a request share theirs.
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
