package attempt

import (
	"cmp"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2"
)

// Did is what was done to a request for its engine.
type Did struct {
	Engine      string        // the engine's type; empty if nothing was done
	Unsupported engine.Fields // the client's nvext fields that the engine does not support
	CutIDs      bool          // the router has asked for ids, which the client does not get
	Cut         nvext.Grants  // that were missing for members cut out of the body
}

var errResent = errors.New("kv_router: the request was already resent once")

// build returns the client's request for the worker's engine, with the body from its first byte. It is shared
// if an attempt before may still be writing the header.
func (a *Attempt) build(req *http.Request, shared bool) *http.Request {
	p, whole := a.Call.Plan, a.Call.Body
	fit, send := a.adapt(req)
	if whole == nil {
		return fit
	}
	out := *fit
	if shared {
		out.Header = maps.Clone(out.Header)
	}
	if readsAnswer(p, a.Worker) {
		out.Header.Set("Accept-Encoding", "identity")
	}
	if whole.Size == 0 || req.Body == nil { // the operator's `method GET` has the proxy drop the body
		return &out
	}
	out.Body, out.ContentLength = send.Open(), send.Size
	if req.ContentLength < 0 {
		out.ContentLength = -1 // the client sent it in chunks
	}
	// Engines close idle connections when they please. net/http repeats such a request if
	// it has GetBody and is idempotent. A header without values marks it so, and is not sent.
	// Two engines that get a phase at once must not get it twice.
	once := a.Phase != nil && a.Worker.Engine().Phases().Concurrent
	if _, set := out.Header["Idempotency-Key"]; !set && p.API != nil && !once {
		out.Header["Idempotency-Key"] = []string{}
	}
	a.resends.Store(0)
	out.GetBody = func() (io.ReadCloser, error) {
		if !a.resends.CompareAndSwap(0, 1) {
			return nil, errResent
		}
		return send.Open(), nil
	}
	return &out
}

// readsAnswer returns whether the router reads the answer as it passes, or its beginning. It must not be
// compressed then.
func readsAnswer(p *plan.Plan, w *worker.Worker) bool {
	return p.Request != nil || p.Lists || p.Everywhere || p.Makes() || Renames(p, w)
}

// adapt puts the request in the engine's words, and records in the Call what that took.
func (a *Attempt) adapt(req *http.Request) (*http.Request, body.Edited) {
	c, p, w := a.Call, a.Call.Plan, a.Worker
	c.Did = Did{}
	var as body.Edited
	if c.Body != nil {
		as = body.Edited{Of: c.Body, Size: c.Body.Size}
	}
	answers := a.Phase == nil || !a.Phase.Prefill
	ranks, renames, backup := w.Ranks(), Renames(p, w), w.IsBackup()
	adapts := ranks > 1 || p.EditsBody || p.AsksUsage || c.Session != "" || a.Phase != nil || c.Rest != nil || c.AskIDs || backup
	if p.Everywhere || !adapts && !renames {
		return req, as
	}
	var edit *rawjson.Editor
	if read := p.Parsed(); read != nil && c.Body != nil {
		edit = read.Editor(c.Body.Data)
	}
	var done engine.Adapted
	to, kind := w.Engine(), engine.PostTo(req.URL.Path)
	if p.API != nil {
		kind = p.API.Name()
	}
	if adapts {
		done = to.Adapt(&engine.Request{
			API: kind, Body: edit, Ext: p.Ext, Grants: p.Grants, Salt: p.Salt(), Sent: req.Header,
			Rank: a.Target.Rank, Ranks: ranks, GiveTokens: p.Given, Session: c.Session, Phase: a.Phase,
		})
		c.Engine, c.Unsupported, c.Cut = to.Type, done.Unsupported, done.Dropped
	}
	if edit != nil && backup {
		editForBackup(edit)
	}
	if renames {
		name := ModelAt(p, w)
		if req = renamed(req, p.Named(), name); edit != nil {
			SetModel(edit, p, w)
		} else if c.Body != nil && p.Form.Len() > 0 {
			as = c.Body.Edit([]rawjson.Edit{{Span: p.Form, Text: []byte(name)}})
		}
	}
	if edit != nil && answers {
		if c.Rest != nil {
			to.Continue(edit, kind, c.Rest)
		}
		if c.AskIDs && to.ReturnsIDs(kind) && !api.AsksIDs(edit) {
			api.AskIDs(edit)
			c.CutIDs = true
		}
		if p.AsksUsage {
			p.Request.AskUsage(edit)
		}
	}
	if edit != nil {
		as = c.Body.Edit(edit.Edits())
	}
	return withHeaders(req, done.Headers), as
}

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

// ModelAt returns the name by which a worker gets the request's model. If it differs from the client's, the request
// is changed for the worker, and the answer for the client.
func ModelAt(p *plan.Plan, w *worker.Worker) string { return cmp.Or(w.ModelName(), p.Model) }

// Renames returns whether a worker gets another name of the model than the client uses.
func Renames(p *plan.Plan, w *worker.Worker) bool { return !p.Everywhere && ModelAt(p, w) != p.Named() }

// PublicName returns the name of the model that a worker's answer must carry in place of the engine's; empty if it
// is the same.
func PublicName(p *plan.Plan, w *worker.Worker) string {
	if Renames(p, w) {
		return p.Named()
	}
	return ""
}

const memberModel = "model"

// SetModel replaces the client's name of the model in a body by the worker's.
func SetModel(edit *rawjson.Editor, p *plan.Plan, w *worker.Worker) {
	v := edit.Value(memberModel)
	if text := (rawjson.Span{End: len(v)}).Text(v); text != "" && text == p.Named() || v == nil && p.API != nil && p.Named() == "" {
		edit.Set(memberModel, rawjson.AppendString(nil, ModelAt(p, w)))
	}
}

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

// forBackups are the client's headers that a backup gets. All others may have keys of the client or of the
// engines, or say who asks.
var forBackups = []string{
	"Accept", "Accept-Encoding", "Content-Encoding", "Content-Length", "Content-Type", "User-Agent",
	"Anthropic-Beta", "Anthropic-Version", "Openai-Beta",
	"Idempotency-Key", // for net/http, see build
}

// toBackup returns a request as a backup gets it: with few of its headers, without its query, and with
// the operator's headers for that backup.
func toBackup(req *http.Request, set map[string]string) *http.Request {
	out, at := *req, *req.URL
	out.Trailer = nil
	at.RawQuery, at.ForceQuery = "", false
	out.URL, out.Header = &at, make(http.Header)
	for _, name := range forBackups {
		if values, there := req.Header[name]; there {
			out.Header[name] = values
		}
	}
	repl, _ := req.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	for name, value := range set {
		if value = repl.ReplaceAll(value, ""); strings.EqualFold(name, "Host") {
			out.Host = value
		} else {
			out.Header.Set(name, value)
		}
	}
	return &out
}

// fromBackups are the headers of a backup's answer that the client gets. All others may be about the router's
// account there, or set cookies.
var fromBackups = []string{
	"Cache-Control", "Content-Encoding", "Content-Language", "Content-Length", "Content-Type", "Retry-After", "Www-Authenticate",
	"Request-Id", "X-Request-Id",
}

func fromBackup(resp *http.Response) {
	maps.DeleteFunc(resp.Header, func(name string, _ []string) bool { return !slices.Contains(fromBackups, name) })
	resp.Trailer = nil
}

// editForBackup leaves out of a body what is only for engines of the operator, and leaves one name of the model.
func editForBackup(edit *rawjson.Editor) {
	edit.Cut("cache_salt")
	if v := edit.Value(memberModel); v != nil {
		edit.Set(memberModel, v)
	}
}

// Disowns returns whether a backup refuses a request because of an account there: its key, its credit or its
// rate. Such an answer is not for clients, unless the account is theirs.
func Disowns(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusPaymentRequired, http.StatusForbidden:
		return true
	}
	return Retryable(status)
}

// TheirKey returns whether a backup of these headers gets a key that depends on the request, such as the client's own.
func TheirKey(set map[string]string) bool {
	repl := caddy.NewReplacer() // which knows the environment and files
	for name, value := range set {
		name = strings.ToLower(name)
		if (name == "authorization" || strings.HasSuffix(name, "key")) && strings.Contains(repl.ReplaceKnown(value, ""), "{") {
			return true
		}
	}
	return false
}
