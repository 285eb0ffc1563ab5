package admin

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

type explanation struct {
	Pool       string              `json:"pool"`
	Policy     string              `json:"policy"`
	Unit       string              `json:"cost_unit,omitempty"`
	Refused    *refusalView        `json:"refused,omitempty"`
	Plan       *planView           `json:"plan,omitempty"`
	Home       *homeView           `json:"home,omitempty"`
	Candidates []candidateView     `json:"candidates"`
	LeftOut    []dispatch.LeftOut  `json:"left_out"`
	Chosen     *chosenView         `json:"chosen"`
	Phases     *dispatch.DryPhases `json:"phases,omitempty"`
	Waits      *waitView           `json:"waits,omitempty"`
}

type refusalView struct {
	Status  int    `json:"status"`
	Code    string `json:"code"`
	Message string `json:"message"`
}

type planView struct {
	API             string       `json:"api"`
	Model           string       `json:"model"`
	PublicModel     string       `json:"public_model,omitempty"`
	Streamed        bool         `json:"streamed"`
	PromptKind      string       `json:"prompt_kind"`
	PromptTokens    int64        `json:"prompt_tokens"`
	TokensEstimated bool         `json:"prompt_tokens_estimated"`
	PromptBlocks    int          `json:"prompt_blocks"`
	BlockTokens     float64      `json:"block_tokens"`
	New             *api.Place   `json:"new_from,omitzero"`
	Fallback        string       `json:"fallback,omitempty"`
	Trusted         []string     `json:"trusted_with,omitempty"`
	Dropped         []string     `json:"dropped,omitempty"`
	Session         *sessionView `json:"session"`
}

type candidateView struct {
	kvscore.Target
	Dial string `json:"dial"`
	*kvscore.Candidate
	TTFT float64 `json:"predicted_ttft_ms"`
}

func viewCandidate(dial string, c *kvscore.Candidate) candidateView {
	return candidateView{Target: c.Target, Dial: dial, Candidate: c, TTFT: c.TTFT()}
}

type homeView struct {
	*dispatch.DryBoundTarget
	Dial      string `json:"dial"`
	Candidate bool   `json:"is_candidate"`
}

type waitView struct {
	Before int      `json:"waiting_requests"`
	Why    []string `json:"why"`
}

type chosenView struct {
	kvscore.Target
	Dial      string           `json:"dial"`
	Reason    string           `json:"reason"`
	Sentence  string           `json:"sentence"`
	Preferred kvscore.Target   `json:"policy_would_choose"`
	Drawn     []kvscore.Target `json:"drawn_among,omitempty"`
}

var promptKinds = map[api.Kind]string{api.None: "none", api.Text: "text", api.Tokens: "tokens"}

// explain reads and plans a request and makes its choice, but books nothing.
func (x *Explainer) explain(r *http.Request) (*explanation, error) {
	p, err := x.Reader.Read(r)
	if own, ok := errors.AsType[*api.Refusal](err); ok {
		return x.view(nil, &dispatch.DryChoice{Refused: own}), nil
	}
	if err != nil {
		return nil, err
	}
	defer p.Close()
	return x.view(p, x.Dispatcher.Explain(p)), nil
}

// view returns the choice that would be made for a planned request as the admin API
// shows it. There is no plan if the router refuses to make one.
func (x *Explainer) view(p *plan.Plan, c *dispatch.DryChoice) *explanation {
	e := &explanation{
		Pool: x.Dispatcher.Pool.Name, Unit: c.Unit,
		Candidates: []candidateView{}, LeftOut: append([]dispatch.LeftOut{}, c.LeftOut...),
	}
	e.Policy = x.policyName()
	if own := c.Refused; own != nil {
		e.Refused = &refusalView{Status: own.Status, Code: own.Code, Message: own.Error()}
	}
	if p == nil {
		return e
	}
	e.Plan = viewPlan(x.Dispatcher.Pool, p)
	if len(c.Waits) > 0 {
		e.Waits = &waitView{x.Dispatcher.Pool.Waiting(), c.Waits}
	}
	if len(c.Candidates) == 0 {
		return e
	}
	e.Plan.PromptTokens = c.Tokens
	for i := range c.Candidates {
		e.Candidates = append(e.Candidates, viewCandidate(c.Workers[i].Dial, &c.Candidates[i]))
	}
	if h := c.BoundTarget; h != nil {
		e.Home = &homeView{DryBoundTarget: h, Dial: dials(x.Dispatcher.Pool)[h.Target], Candidate: h.Position >= 0}
	}
	e.Chosen, e.Phases, e.Plan.New = viewChosen(c, e.Candidates), c.Phases, newIn(p, c.Candidates)
	return e
}

func viewChosen(c *dispatch.DryChoice, list []candidateView) *chosenView {
	chosen := &list[c.Picked.Chosen]
	v := &chosenView{Target: chosen.Target, Dial: chosen.Dial, Reason: c.Reason, Preferred: list[c.Picked.Preferred].Target}
	var next *candidateView
	for i := range list {
		if i != c.Picked.Chosen && (next == nil || list[i].Cost < next.Cost) {
			next = &list[i]
		}
	}
	unit := c.Unit
	if c.Bound {
		unit = ""
	}
	v.Sentence = sentence(c.Reason, unit, c.Tokens, chosen, next) + degraded(c)
	if !c.Bound {
		for _, i := range c.Picked.Drawn {
			v.Drawn = append(v.Drawn, list[i].Target)
		}
	}
	return v
}

// degraded says what a choice puts up with, and whether chance decides.
func degraded(c *dispatch.DryChoice) (text string) {
	switch {
	case c.Bound:
	case c.Picked.Fault:
		text = " The policy returned an invalid worker, and this one has the least load."
	case len(c.Picked.Drawn) > 0:
		text = " The policy draws it among several."
	}
	switch state := c.Tier.State(); {
	case c.Reason == dispatch.ReasonPin, c.Reason == dispatch.ReasonResponse:
		return text
	case state == pool.Fallback:
		text += " Only prefill workers are left, so that their role is ignored."
	case state >= pool.Draining:
		text += " Only draining workers are left, so that draining is ignored."
	case state == pool.MarkedDown:
		text += " All workers are marked down, so that marks are ignored."
	}
	if c.Tier >= pool.Short {
		text += " The request is probably too long for all workers."
	}
	return text
}

func viewPlan(of *pool.Pool, p *plan.Plan) *planView {
	v := &planView{
		Model: p.Model, PublicModel: p.Public, Streamed: p.Request == nil || p.Request.Stream, PromptKind: promptKinds[api.None],
		PromptTokens: p.Score.Tokens, TokensEstimated: p.Score.Tokens > 0,
		PromptBlocks: len(p.Score.Blocks), BlockTokens: p.Score.BlockTokens, Fallback: p.Fallback,
		Trusted: slices.Collect(p.Grants.Names), Dropped: slices.Collect(p.Dropped.Names),
	}
	if p.API != nil {
		v.API = p.API.Name()
	}
	if p.Request != nil {
		v.PromptKind = promptKinds[p.Request.Kind]
		v.TokensEstimated = p.Request.Kind != api.Tokens && p.Score.Tokens > 0
	}
	if key := p.Session.Key; !key.IsZero() {
		v.Session = &sessionView{KeyHash: key.String()}
		if b, ok := of.Sessions.Peek(key); ok {
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

// Explainer explains where the requests of one handler would go.
type Explainer struct {
	Reader     *plan.Reader
	Dispatcher *dispatch.Dispatcher
}

// explainers are those of all handlers, each with a number: the later it led, the higher. It is 0 before that.
var (
	explainers sync.Map // *Explainer -> int64
	led        atomic.Int64
)

// Join makes an explainer answer for its pool if no other one does. Its configuration may still be rejected.
func (x *Explainer) Join() { explainers.Store(x, int64(0)) }

// Lead makes an explainer answer for its pool. Its configuration has begun to serve.
func (x *Explainer) Lead() { explainers.Store(x, led.Add(1)) }

// Leave ends Join and Lead.
func (x *Explainer) Leave() { explainers.Delete(x) }

// explainerOf returns the explainer that answers for a pool: that of the handler which led
// last. It returns nil for a moment when a pool begins or ends.
func explainerOf(p *pool.Pool) (found *Explainer) {
	last := int64(-1)
	for key, number := range explainers.Range {
		x, _ := key.(*Explainer)
		if n, _ := number.(int64); x.Dispatcher.Pool == p && n > last {
			found, last = x, n
		}
	}
	return found
}

// newIn returns where the part of a prompt begins that no candidate has cached, to a block. It is new, or has
// been evicted. It is nil if there is none, or the place is unknown.
func newIn(p *plan.Plan, candidates []kvscore.Candidate) *api.Place {
	held := 0
	for i := range candidates {
		held = max(held, candidates[i].HeldBlocks)
	}
	if p.Request == nil || held >= len(p.Score.Blocks) {
		return nil
	}
	if p.Request.Kind == api.Tokens {
		return &api.Place{Token: held * int(p.Score.BlockTokens)}
	}
	if p.Body.Buffer == nil || p.Request.Kind != api.Text {
		return nil
	}
	from := held * p.TextBlock
	return new(api.Find(p.API, p.Body.Buffer.Data, from, from+p.TextBlock))
}

func difference(n *api.Place) string {
	where := fmt.Sprintf("byte %d of the prompt", n.Byte)
	switch {
	case n.Text == "":
		return fmt.Sprintf("The first difference to what is cached comes after token %d.", n.Token)
	case n.Message > 0:
		where = fmt.Sprintf("byte %d of message %d (%s)", n.Byte, n.Message, n.Role)
	case n.Role != "":
		where = fmt.Sprintf("byte %d of the %s", n.Byte, n.Role)
	}
	return fmt.Sprintf("The first difference to what is cached comes soon after %s: %q", where, strings.TrimSpace(n.Text))
}
