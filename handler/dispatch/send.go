package dispatch

import (
	"errors"
	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"io"
	"maps"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

// RoundTrip makes the attempt that was selected.
func (d *Dispatch) RoundTrip(req *http.Request) (*http.Response, error) {
	if d.exhausted {
		return d.giveUp()
	}
	a := d.attempt
	resp, resent, err := d.send(req)
	v := d.judge(req.Context(), resp, resent, err)
	if v.do == retry && !d.affordable(a, err) {
		v.do = fail
		if resp != nil {
			v.do = deliver
		}
	}
	if v.do != deliver {
		d.endAttempt(false)
	}
	d.Pool.Report(a.Worker, v.outcome)
	if v.suspect {
		d.suspects++
	}
	if err != nil && req.Context().Err() == nil {
		d.failure = err
	}
	switch v.do {
	case deliver:
		return d.deliver(req, resp), nil
	case retry:
		return d.askForRetry(req, resp, &v, err)
	case abandon:
		return nil, err
	case fail:
	}
	return d.giveUp()
}

// send sends the request to the attempt's worker. resent: net/http sent it twice.
func (d *Dispatch) send(req *http.Request) (resp *http.Response, resent bool, err error) {
	if err = d.openSession(req); err != nil {
		return nil, false, err
	}
	sent := d.watched(req)
	resp, resent, err = d.sendOver(d.Transport.Send, sent)
	if err != nil && resent && d.plan.API != nil && sent.Context().Err() == nil && d.noRetryPossible() {
		// The only worker closed idle connections, and net/http's second try met
		// another one of these.
		d.countRetry(d.attempt, "reconnect")
		resp, _, err = d.sendOver(d.Transport.SendFresh, sent)
	}
	if err = d.arrived(resp, err); err != nil {
		return nil, resent, err
	}
	return resp, resent, nil
}

// sendOver makes one round trip. It returns whether net/http sent the request again after a
// kept connection turned out closed.
func (d *Dispatch) sendOver(roundTrip func(*http.Request) (*http.Response, error), req *http.Request) (*http.Response, bool, error) {
	resends := new(atomic.Int32)
	d.sent = d.trace.carry(d.request(req, resends))
	resp, err := roundTrip(d.sent)
	if err == nil && d.readsAnswer() {
		response.Unpack(resp)
	}
	n := resends.Load()
	if n > 0 {
		d.Pool.CountRetries(d.attempt.Worker, "resend", int(n))
	}
	return resp, n > 0, err
}

// readsAnswer returns whether the router reads the answer as it passes. It must not be
// compressed then.
func (d *Dispatch) readsAnswer() bool { return d.plan.Request != nil || d.plan.Lists }

var errResent = errors.New("kv_router: the request was already resent once")

// request returns the request of this attempt, with the body from its first byte.
func (d *Dispatch) request(req *http.Request, resends *atomic.Int32) *http.Request {
	whole := d.Body
	if whole == nil {
		req, _ = d.adapted(req, nil)
		return req
	}
	fit, send := d.adapted(req, whole)
	out := *fit
	if d.sent != nil {
		out.Header = maps.Clone(out.Header) // an attempt before may still be writing it
	}
	if d.readsAnswer() {
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
	if _, set := out.Header["Idempotency-Key"]; !set && d.plan.API != nil {
		out.Header["Idempotency-Key"] = []string{}
	}
	out.GetBody = func() (io.ReadCloser, error) {
		if resends.Add(1) > 1 {
			resends.Add(-1)
			return nil, errResent
		}
		return send.Open(), nil
	}
	return &out
}

// dropBody frees the body, which is not sent again: an answer may take long.
func (d *Dispatch) dropBody() {
	if d.Body != nil {
		d.takeBody().Done()
	}
}

// takeBody takes the request's body from everything that might send it again.
func (d *Dispatch) takeBody() *body.Replay {
	whole := d.Body
	d.Body = nil
	if d.lazy != nil {
		d.lazy.Release()
	}
	if d.sent != nil {
		d.sent.GetBody = nil
	}
	return whole
}

// Prepared returns one of the router's own requests, adapted to a worker's engine. It does
// not count what it cuts out of the body.
func (s *Dispatcher) Prepared(req *http.Request, p *plan.Plan, whole *body.Replay, w *pool.Worker, t kvscore.Target) *http.Request {
	d := &Dispatch{Dispatcher: s, plan: p, outgoing: outgoing{Body: whole, cut: nvext.Everything}}
	d.attempt = &attempt{Attempt: pool.Attempt{Worker: w, Target: t}}
	return d.request(req, new(atomic.Int32))
}

// adapted returns the request of an attempt and its body, adapted to the engine.
func (d *Dispatch) adapted(req *http.Request, whole *body.Replay) (*http.Request, body.Edited) {
	var as body.Edited
	if whole != nil {
		as = body.Edited{Of: whole, Size: whole.Size}
	}
	a, p := d.attempt, d.plan
	ranks := a.Worker.Ranks()
	reports := len(p.Score.Identities) > 0 && discovery.Of(a.Worker).WantsReport(a.Target)
	if ranks < 2 && !p.EditsBody && !p.AsksUsage && d.backed.id == "" && !reports {
		return req, as
	}
	var edit *api.Editor
	if read := p.Parsed(); read != nil && whole != nil {
		edit = read.Editor(whole.Data)
	}
	e := a.Worker.Engine()
	say := engine.Request{
		Body: edit, Ext: p.Ext, Grants: p.Grants, Salt: p.Salt(), Sent: req.Header,
		Rank: a.Target.Rank, Ranks: ranks, GiveTokens: p.Given, Session: d.backed.id, ReportCache: reports,
	}
	if p.API != nil {
		say.API = p.API.Name()
	} else {
		say.API = engine.PostTo(req.URL.Path)
	}
	said := e.Adapt(&say)
	if p.Computes {
		d.lacks(e.Type, said.Lacks)
	}
	d.noticeCut(said.Dropped)
	if edit != nil {
		if p.AsksUsage {
			edit.Replace(p.AskUsage)
		}
		as = whole.Edit(edit.Edits())
	}
	return withHeaders(req, said.Headers), as
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

// lacks records the client's nvext fields that an engine does not support.
func (d *Dispatch) lacks(kind string, fields engine.Fields) {
	if fields == 0 {
		return
	}
	if kind == "" {
		kind = engine.Other
	}
	for name := range fields.Names {
		d.Metrics.unsupported.WithLabelValues(d.Pool.Name, kind, name).Inc()
	}
	d.Pool.Incidents.Raise(time.Now(), "clients request nvext fields that the engine does not support", d.Pool.Logger)
}

// noticeCut counts, once per request, members that were cut out of the body because they were
// not granted.
func (d *Dispatch) noticeCut(grants nvext.Grants) {
	grants &^= d.cut | d.plan.Dropped
	if grants == 0 {
		return
	}
	d.cut |= grants
	for name := range grants.Names {
		d.Metrics.dropped.WithLabelValues(d.Pool.Name, name).Inc()
	}
	if c := d.Logger.Check(zap.DebugLevel, "removed body members that trust does not grant"); c != nil {
		c.Write(zap.Stringer("not_granted", grants))
	}
}
