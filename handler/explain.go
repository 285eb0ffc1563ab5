package handler

import (
	"errors"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// join makes a handler one of the pool's.
func (p *pool) join(h *Handler) {
	p.handlersMu.Lock()
	defer p.handlersMu.Unlock()
	p.handlers = append(p.handlers, h)
}

// leave is the end of join.
func (p *pool) leave(h *Handler) {
	p.handlersMu.Lock()
	defer p.handlersMu.Unlock()
	p.handlers = slices.DeleteFunc(p.handlers, func(o *Handler) bool { return o == h })
	if p.current == h {
		p.current = nil
	}
}

// lead makes a handler whose configuration begins to serve the one whose settings
// count, unless another one of that configuration is.
func (p *pool) lead(h *Handler) {
	p.handlersMu.Lock()
	defer p.handlersMu.Unlock()
	if slices.Contains(p.handlers, h) && (p.current == nil || p.current.config != h.config) {
		p.current = h
	}
}

// follow makes a handler with its first request the one whose settings count.
func (p *pool) follow(h *Handler) {
	if h.served.Load() || !h.served.CompareAndSwap(false, true) {
		return
	}
	p.handlersMu.Lock()
	defer p.handlersMu.Unlock()
	if slices.Contains(p.handlers, h) { // else its configuration has ended
		p.current = h
	}
}

// handler returns the handler whose settings count: of those in use, the one
// that was the last to serve its first request. If no handler of the active
// configuration has served a request, it is any of them. Before a configuration is
// active, it is the oldest handler, because newer configurations may be rejected.
// It is nil for a moment when a pool begins or ends.
func (p *pool) handler() *Handler {
	p.handlersMu.Lock()
	defer p.handlersMu.Unlock()
	if p.current != nil || len(p.handlers) == 0 {
		return p.current
	}
	return p.handlers[0]
}

// explanation is what would become of a request at this moment.
type explanation struct {
	Pool   string `json:"pool"`
	Policy string `json:"policy"`
	// Unit is that of the candidates' costs, empty if the policy compares none.
	Unit string `json:"cost_unit,omitempty"`
	// Refused is what the router itself would answer, if it would.
	Refused    *refusalView    `json:"refused,omitempty"`
	Plan       *planView       `json:"plan,omitempty"`
	Home       *homeView       `json:"home,omitempty"`
	Candidates []candidateView `json:"candidates"`
	LeftOut    []leftOut       `json:"left_out"`
	Chosen     *chosenView     `json:"chosen"`
	// Waits is there if the request would wait, as all workers are full.
	Waits *waitView `json:"waits,omitempty"`

	refused *api.Refusal
}

// refuse takes in what the router itself would answer.
func (e *explanation) refuse(own *api.Refusal) *explanation {
	e.refused, e.Refused = own, &refusalView{own.Status, own.Code, own.Error()}
	return e
}

type refusalView struct {
	Status  int    `json:"status"`
	Code    string `json:"code"`
	Message string `json:"message"`
}

type planView struct {
	// API is empty for a request that passes through.
	API      string `json:"api"`
	Model    string `json:"model"`
	Streamed bool   `json:"streamed"`
	// PromptKind is `tokens`, `text`, or `none` where nothing is compared.
	PromptKind      string  `json:"prompt_kind"`
	PromptTokens    int64   `json:"prompt_tokens"`
	TokensEstimated bool    `json:"prompt_tokens_estimated"`
	PromptBlocks    int     `json:"prompt_blocks"`
	BlockTokens     float64 `json:"block_tokens"`
	// Fallback says why nothing is compared.
	Fallback string `json:"fallback,omitempty"`
	// Trusted and Dropped are the kinds of wishes that were granted and dropped.
	Trusted []string     `json:"trusted_with,omitempty"`
	Dropped []string     `json:"dropped,omitempty"`
	Session *sessionView `json:"session"`
}

// candidateView is a kvscore.Candidate.
type candidateView struct {
	Worker         uint64  `json:"worker"`
	Dial           string  `json:"dial"`
	Rank           uint32  `json:"dp_rank"`
	OverlapBlocks  float64 `json:"overlap_blocks"`
	OverlapTokens  int64   `json:"overlap_tokens"`
	PrefillTokens  int64   `json:"prefill_tokens"`
	PromptBlocks   float64 `json:"prompt_blocks"`
	UnsharedBlocks float64 `json:"unshared_blocks"`
	OutputBlocks   float64 `json:"output_blocks"`
	RequestBlocks  float64 `json:"request_blocks"`
	SharedBlocks   float64 `json:"shared_blocks"`
	Requests       int     `json:"requests"`
	Cost           float64 `json:"cost"`
	// Unknown says that the worker's load is not known, and the medians of the
	// others' stand for it.
	Unknown bool `json:"load_unknown"`
	timesView
}

// leftOut is a worker that is no candidate.
type leftOut struct {
	Worker uint64 `json:"worker"`
	Dial   string `json:"dial"`
	Why    string `json:"why"`
}

type chosenView struct {
	Worker uint64 `json:"worker"`
	Dial   string `json:"dial"`
	Rank   uint32 `json:"dp_rank"`
	Reason string `json:"reason"`
	Why    string `json:"why"`
	// Preferred is the worker that the policy would choose if the session did
	// not decide.
	Preferred     uint64 `json:"policy_would_choose"`
	PreferredRank uint32 `json:"policy_would_choose_dp_rank"`
	// Drawn are the workers that chance decides among, once for each of
	// DrawnRanks.
	Drawn      []uint64 `json:"drawn_among,omitempty"`
	DrawnRanks []uint32 `json:"drawn_among_dp_ranks,omitempty"`
}

var promptKinds = map[api.Kind]string{api.None: "none", api.Text: "text", api.Tokens: "tokens"}

// explainer tells where the requests of one configuration would go.
type explainer struct {
	*dispatcher
	reader *reader
}

// explain tells what would become of a request. It goes the way of one that is
// served, up to the choice, but leaves nothing behind.
func (x *explainer) explain(r *http.Request) (*explanation, error) {
	p, err := x.reader.read(r)
	if own, ok := errors.AsType[*api.Refusal](err); ok {
		return x.newExplanation().refuse(own), nil
	}
	if err != nil {
		return nil, err
	}
	defer p.done()
	return x.explainPlan(r, p), nil
}

func (x *explainer) newExplanation() *explanation {
	e := &explanation{Pool: x.pool.name, Candidates: []candidateView{}, LeftOut: []leftOut{}}
	if m, ok := x.active.(caddy.Module); ok {
		e.Policy = m.CaddyModule().ID.Name()
	}
	return e
}

// dryRoute returns the route of a request of which only is asked what would become
// of it.
func (d *dispatcher) dryRoute(r *http.Request, p *plan) *route {
	rt := &route{dispatcher: d, plan: p, cached: -1, dry: true}
	rt.repl, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	return rt
}

// explainPlan tells what would become of a request that was planned. A client
// that only asks is told of a worker though all are full: it will wait for that
// one, then.
func (x *explainer) explainPlan(r *http.Request, p *plan) *explanation {
	e, t := x.newExplanation(), time.Now()
	rt := x.dryRoute(r, p)
	rt.start = t
	rt.takeScratch()
	defer rt.returnScratch()
	e.Plan = rt.viewPlan()
	if own := x.checkModel(p); own != nil {
		return e.refuse(own)
	}
	if own, ok := errors.AsType[*api.Refusal](rt.narrow(r)); ok {
		return e.refuse(own)
	}
	rt.offered = x.upstreams(r)
	used, found := rt.gather(rt.offered, t)
	if !found && len(rt.scratch.full) > 0 {
		e.Waits = &waitView{int(rt.pool.queue.length.Load())}
		if p.ext.QueryOnly() {
			want := rt.wants()
			want.Slot = false
			used, found = rt.pool.gather(rt.scratch, &want, rt.model, rt.offers(), nil, t)
		}
	}
	e.LeftOut = rt.leftOut(e.LeftOut)
	if !found && e.Waits != nil {
		return e
	}
	if !found {
		return e.refuse(&api.Refusal{API: p.api, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, Err: rt.errNobody()})
	}
	bound := rt.boundPosition()
	targets := make([]kvscore.Target, 0, len(rt.scratch.targets))
	for _, ref := range rt.scratch.targets {
		targets = append(targets, ref.Target)
	}
	e.Unit = kvscore.CostUnit(rt.policy())
	chosen := rt.pool.scheduler.Explain(t, rt.score(), targets, bound, rt.policy(), &rt.scratch.sel)
	e.fill(rt, chosen, bound, used)
	return e
}

// fill records the choice.
func (e *explanation) fill(rt *route, x kvscore.Explanation, bound int, used resort) {
	if e.Plan != nil {
		e.Plan.PromptTokens = rt.scratch.sel.Tokens
	}
	for i := range rt.scratch.sel.Candidates {
		c := &rt.scratch.sel.Candidates[i]
		e.Candidates = append(e.Candidates, candidateView{
			c.Target.Worker, rt.scratch.workers[i].dial, c.Target.Rank, c.OverlapBlocks, c.OverlapTokens, c.PrefillTokens,
			c.PromptBlocks, c.UnsharedBlocks, c.OutputBlocks, c.RequestBlocks, c.SharedBlocks, c.Requests, c.Cost, c.Unknown, viewTimes(c, e.Unit),
		})
	}
	c, preferred := &rt.scratch.sel.Candidates[x.Chosen], rt.scratch.sel.Candidates[x.Preferred].Target
	e.Chosen = &chosenView{
		Worker: c.Target.Worker, Dial: rt.scratch.workers[x.Chosen].dial, Rank: c.Target.Rank,
		Reason: rt.reasonOf(bound, c), Preferred: preferred.Worker, PreferredRank: preferred.Rank,
	}
	if bound < 0 {
		for _, i := range x.Drawn {
			e.Chosen.Drawn = append(e.Chosen.Drawn, rt.scratch.sel.Candidates[i].Target.Worker)
			e.Chosen.DrawnRanks = append(e.Chosen.DrawnRanks, rt.scratch.sel.Candidates[i].Target.Rank)
		}
	}
	e.Home = rt.viewHome(x.Chosen)
	e.Chosen.Why = why(x, bound, len(rt.scratch.targets), rt.plan.request == nil)
	if home := rt.scratch.sel.Home; bound < 0 && home >= 0 {
		if home == x.Chosen {
			e.Chosen.Why += "; the session is bound to it"
		} else {
			e.Chosen.Why += "; the session is bound to another one, and leaving that costs less"
		}
	}
	switch {
	case rt.only.reason == reasonPin:
		e.Chosen.Why = "the request names it"
	case rt.only.reason == reasonResponse:
		e.Chosen.Why = "it keeps the response that the request names"
	case used.draining:
		e.Chosen.Why += "; only draining workers are left, so that draining is ignored"
	case used.marked:
		e.Chosen.Why += "; all workers are rated down, so that marks are ignored"
	}
}

// why returns in words what decided the choice.
func why(x kvscore.Explanation, bound, candidates int, passesThrough bool) string {
	switch {
	case bound >= 0:
		return "the session is bound to it"
	case candidates == 1:
		return "it is the only candidate"
	case x.Fault:
		return "the policy returned no candidate, or changed their list, and the least loaded one is taken"
	case len(x.Drawn) > 0:
		return "the policy draws it among several"
	case passesThrough:
		return "the request passes through, and it has the least load"
	}
	return "the policy prefers it"
}

func (rt *route) viewPlan() *planView {
	p := rt.plan
	v := &planView{
		Model: p.model, Streamed: p.score.Streamed, PromptKind: promptKinds[api.None],
		PromptTokens: p.score.Tokens, TokensEstimated: p.score.Tokens > 0,
		PromptBlocks: len(p.score.Blocks), BlockTokens: p.score.BlockTokens, Fallback: p.fallback,
	}
	if p.api != nil {
		v.API = p.api.Name()
	}
	for name := range p.grants.Names {
		v.Trusted = append(v.Trusted, name)
	}
	for name := range p.dropped.Names {
		v.Dropped = append(v.Dropped, name)
	}
	if p.request != nil {
		v.PromptKind = promptKinds[p.request.Kind]
		v.TokensEstimated = p.request.Kind != api.Tokens && p.score.Tokens > 0
	}
	if p.session.key != "" {
		v.Session = &sessionView{KeyHash: keyHash(p.session.key)}
		if b, ok := rt.pool.sessions.Peek(p.session.key); ok {
			*v.Session = viewSession(v.Session.KeyHash, b, rt.pool.dials(), rt.start)
		}
	}
	return v
}

// leftOut adds the workers that are offered but are not candidates, with the reason.
func (rt *route) leftOut(list []leftOut) []leftOut {
	rows := rt.table(rt.offered).rows // which gather has used
	for i, up := range rt.offered {
		w := rows[i].worker
		if slices.Contains(rt.scratch.workers, w) {
			continue
		}
		why := "rated_down"
		switch {
		case !available(up):
			why = "proxy_unavailable" // by its health checks, or it is full
		case rt.pinned() && w != rt.only.worker:
			why = "not_named"
		case !rt.keepsApart(w):
			why = "shares_cache"
		case !rt.permits(w):
			why = "not_allowed"
		case !rt.fits(w):
			why = "other_models"
		case slices.Contains(rt.scratch.full, w):
			why = "full"
		case w.draining():
			why = "draining"
		}
		list = append(list, leftOut{w.id, w.dial, why})
	}
	return list
}

// upstreams returns those that the proxy would offer for a request.
func (d *dispatcher) upstreams(r *http.Request) reverseproxy.UpstreamPool {
	if source := d.proxy.DynamicUpstreams; source != nil {
		if ups, err := source.GetUpstreams(r); err == nil {
			return ups
		}
	}
	return d.proxy.Upstreams
}

// asClient turns a request to the admin endpoint into the request that a client would
// send to the path.
func asClient(r *http.Request, path string) (*http.Request, error) {
	u, err := url.ParseRequestURI(path)
	if err != nil {
		return nil, err
	}
	out := r.Clone(r.Context())
	out.URL, out.RequestURI = u, path
	// upstreams may have placeholders
	return caddyhttp.PrepareRequest(out, caddy.NewReplacer(), nil, new(caddyhttp.Server)), nil
}
