package admin

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

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
	LeftOut    []leftOutView   `json:"left_out"`
	Chosen     *chosenView     `json:"chosen"`
	// Waits is there if the request would wait, as all workers are full.
	Waits *waitView `json:"waits,omitempty"`
}

// targetView names a target.
type targetView struct {
	Worker uint64 `json:"worker"`
	Dial   string `json:"dial"`
	Rank   uint32 `json:"dp_rank"`
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
	targetView
	OverlapBlocks  float64 `json:"overlap_blocks"`
	OverlapTokens  int64   `json:"overlap_tokens"`
	Knowledge      string  `json:"knowledge"`
	PrefillTokens  int64   `json:"prefill_tokens"`
	PromptBlocks   float64 `json:"prompt_blocks"`
	UnsharedBlocks float64 `json:"unshared_blocks"`
	OutputBlocks   float64 `json:"output_blocks"`
	RequestBlocks  float64 `json:"request_blocks"`
	SharedBlocks   float64 `json:"shared_blocks"`
	Requests       int     `json:"requests"`
	Foreign        int     `json:"other_clients_requests"`
	Cost           float64 `json:"cost"`
	// Unknown is whether medians of the others stand for the worker's unknown load.
	Unknown    bool    `json:"load_unknown"`
	Awaiting   int     `json:"awaiting_requests"`
	Wait       float64 `json:"wait_ms"`
	Prefill    float64 `json:"prefill_ms"`
	TTFT       float64 `json:"predicted_ttft_ms"`
	Slowness   float64 `json:"slowness"`
	RecentWork float64 `json:"recent_work_ms"`
	// The sum of Terms, times Factor, is Cost; only predicted_latency has terms.
	Terms *termsView `json:"terms_ms,omitempty"`
	// Factor is the client's preference; absent if there is none.
	Factor float64 `json:"factor,omitempty"`
}

// termsView is a kvscore.Terms.
type termsView struct {
	Wait    float64 `json:"wait"`
	Prefill float64 `json:"prefill"`
	Delay   float64 `json:"delay"`
	Decode  float64 `json:"decode"`
	Turns   float64 `json:"turns"`
	Leave   float64 `json:"leave"`
}

// homeView is the target that a session is bound to, as a choice sees it.
type homeView struct {
	targetView
	Candidate bool `json:"is_candidate"`
	// Holds is whether it holds at least half of what any candidate holds.
	Holds bool `json:"holds_prompt"`
	// Leave is the price of going elsewhere; null where the session must not leave.
	Leave *float64 `json:"leave_ms"`
	// Stays is whether the session is still bound to it after this turn.
	Stays bool `json:"session_stays"`
}

// waitView is how many requests wait already.
type waitView struct {
	Before int `json:"waiting_requests"`
}

// leftOutView is a worker that is no candidate.
type leftOutView struct {
	Worker uint64 `json:"worker"`
	Dial   string `json:"dial"`
	Why    string `json:"why"`
}

type chosenView struct {
	targetView
	Reason string `json:"reason"`
	Why    string `json:"why"`
	// Preferred is the policy's choice if the session did not decide.
	Preferred     uint64 `json:"policy_would_choose"`
	PreferredRank uint32 `json:"policy_would_choose_dp_rank"`
	// Drawn and DrawnRanks are the targets that chance decides among.
	Drawn      []uint64 `json:"drawn_among,omitempty"`
	DrawnRanks []uint32 `json:"drawn_among_dp_ranks,omitempty"`
}

var promptKinds = map[api.Kind]string{api.None: "none", api.Text: "text", api.Tokens: "tokens"}

// explain reads and plans a request and makes its choice, but books nothing.
func (x *Explainer) explain(r *http.Request) (*explanation, error) {
	p, err := x.Reader.Read(r)
	if own, ok := errors.AsType[*api.Refusal](err); ok {
		e := x.newExplanation()
		e.Refused = &refusalView{own.Status, own.Code, own.Error()}
		return e, nil
	}
	if err != nil {
		return nil, err
	}
	defer p.Close()
	return x.view(r.Context(), p, x.Dispatcher.Explain(r, p)), nil
}

func (x *Explainer) newExplanation() *explanation {
	e := &explanation{Pool: x.Pool.Name, Candidates: []candidateView{}, LeftOut: []leftOutView{}}
	if m, ok := x.Policy.(caddy.Module); ok {
		e.Policy = m.CaddyModule().ID.Name()
	}
	return e
}

// view returns the choice that would be made for a planned request as the admin API
// shows it.
func (x *Explainer) view(ctx context.Context, p *plan.Plan, c *dispatch.DryChoice) *explanation {
	e := x.newExplanation()
	e.Plan, e.Unit = viewPlan(ctx, x.Pool, p), c.Unit
	if own := c.Refused; own != nil {
		e.Refused = &refusalView{own.Status, own.Code, own.Error()}
	}
	if c.Full {
		e.Waits = &waitView{x.Pool.Waiting()}
	}
	for _, l := range c.LeftOut {
		e.LeftOut = append(e.LeftOut, leftOutView{l.Worker.ID, l.Worker.Dial, l.Why.String()})
	}
	if len(c.Candidates) == 0 {
		return e
	}
	e.Plan.PromptTokens = c.Tokens
	for i := range c.Candidates {
		e.Candidates = append(e.Candidates, viewCandidate(&c.Candidates[i], c.Workers[i].Dial, e.Unit))
	}
	e.Home, e.Chosen = viewHome(x.Pool, c.Home), viewChosen(p, c)
	return e
}

func viewCandidate(c *kvscore.Candidate, dial, unit string) candidateView {
	v := candidateView{
		targetView{c.Target.Worker, dial, c.Target.Rank},
		c.OverlapBlocks, c.OverlapTokens, c.Knowledge.String(), c.PrefillTokens,
		c.PromptBlocks, c.UnsharedBlocks, c.OutputBlocks, c.RequestBlocks, c.SharedBlocks, c.Requests, c.Foreign, c.Cost, c.Unknown,
		c.Awaiting, c.WaitTime, c.PrefillTime, c.TTFT(), c.Slowness, c.RecentWork, nil, c.Factor,
	}
	if unit == kvscore.UnitMilliseconds {
		v.Terms = (*termsView)(&c.Terms)
	}
	return v
}

// viewHome returns nil if the session is not bound.
func viewHome(p *pool.Pool, h *dispatch.DryHome) *homeView {
	if h == nil {
		return nil
	}
	v := &homeView{
		targetView: targetView{h.Target.Worker, dials(p)[h.Target], h.Target.Rank},
		Candidate:  h.Position >= 0, Holds: h.Holds, Stays: h.Stays,
	}
	if h.Priced {
		v.Leave = &h.Leave
	}
	return v
}

func viewChosen(p *plan.Plan, c *dispatch.DryChoice) *chosenView {
	chosen, preferred := c.Candidates[c.Picked.Chosen].Target, c.Candidates[c.Picked.Preferred].Target
	v := &chosenView{
		targetView: targetView{chosen.Worker, c.Workers[c.Picked.Chosen].Dial, chosen.Rank},
		Reason:     c.Reason, Why: why(p, c), Preferred: preferred.Worker, PreferredRank: preferred.Rank,
	}
	if !c.Bound {
		for _, i := range c.Picked.Drawn {
			v.Drawn = append(v.Drawn, c.Candidates[i].Target.Worker)
			v.DrawnRanks = append(v.DrawnRanks, c.Candidates[i].Target.Rank)
		}
	}
	return v
}

// why returns in words what decided the choice.
func why(p *plan.Plan, c *dispatch.DryChoice) string {
	switch c.Reason {
	case dispatch.ReasonPin:
		return "the request names it"
	case dispatch.ReasonResponse:
		return "it keeps the response that the request names"
	}
	text := "the policy prefers it"
	switch {
	case c.Bound:
		text = "the session is bound to it"
	case len(c.Candidates) == 1:
		text = "it is the only candidate"
	case c.Picked.Fault:
		text = "the policy returned an invalid worker, and this one has the least load"
	case len(c.Picked.Drawn) > 0:
		text = "the policy draws it among several"
	case p.Request == nil:
		text = "the request passes through, and it has the least load"
	}
	if h := c.Home; !c.Bound && h != nil && h.Position >= 0 {
		if h.Position == c.Picked.Chosen {
			text += "; the session is bound to it"
		} else {
			text += "; the session is bound to another one, and leaving that costs less"
		}
	}
	switch {
	case c.Tier >= pool.Draining:
		text += "; only draining workers are left, so that draining is ignored"
	case c.Tier == pool.MarkedDown:
		text += "; all workers are marked down, so that marks are ignored"
	}
	return text
}

func viewPlan(ctx context.Context, of *pool.Pool, p *plan.Plan) *planView {
	v := &planView{
		Model: p.Model, Streamed: p.Score.Streamed, PromptKind: promptKinds[api.None],
		PromptTokens: p.Score.Tokens, TokensEstimated: p.Score.Tokens > 0,
		PromptBlocks: len(p.Score.Blocks), BlockTokens: p.Score.BlockTokens, Fallback: p.Fallback,
	}
	if p.API != nil {
		v.API = p.API.Name()
	}
	for name := range p.Grants.Names {
		v.Trusted = append(v.Trusted, name)
	}
	for name := range p.Dropped.Names {
		v.Dropped = append(v.Dropped, name)
	}
	if p.Request != nil {
		v.PromptKind = promptKinds[p.Request.Kind]
		v.TokensEstimated = p.Request.Kind != api.Tokens && p.Score.Tokens > 0
	}
	if key := p.Session.Key; !key.IsZero() {
		v.Session = &sessionView{KeyHash: key.String()}
		if b, ok, _ := of.Sessions.Peek(ctx, key); ok {
			*v.Session = viewSession(key, &b, dials(of), time.Now())
		}
	}
	return v
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
