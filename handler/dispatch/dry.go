package dispatch

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

// DryChoice is the choice that would be made for a request at this moment.
type DryChoice struct {
	Refused *api.Refusal // by the router itself; nil if it would not
	Full    bool         // the request would wait, because all workers are full
	Waits   []string     // why it would wait; nil if it would not
	LeftOut []LeftOut

	// What follows is empty if no worker would be chosen.
	Candidates  []kvscore.Candidate
	Workers     []*worker.Worker // of Candidates
	Picked      kvscore.Explanation
	Reason      string // of the choice
	Unit        string // of the costs; empty if the policy compares none
	Bound       bool   // the session or the request decided, and no policy was asked
	BoundTarget *DryBoundTarget
	Tier        pool.Verdict // of the candidates
	Tokens      int64        // of the prompt
	Phases      *DryPhases   // nil if no worker is for prefills or decodes
}

// DryPhases says whether the request would be split over two workers.
type DryPhases struct {
	Split bool   `json:"split"`
	Why   string `json:"whole_because,omitzero"` // it cannot be split; empty if the choice decides
	// Prefill is the best worker for the prefill phase, and Time the predicted time to its end.
	Prefill kvscore.Target `json:"prefill,omitzero"`
	Dial    string         `json:"prefill_dial,omitzero"`
	Time    float64        `json:"prefill_ms,omitzero"`
}

// DryBoundTarget is the target that a session is bound to.
type DryBoundTarget struct {
	kvscore.Target
	Position int      `json:"-"`                 // among the candidates; -1 if it is none
	Holds    bool     `json:"holds_prompt"`      // at least half of what any candidate holds of the prompt
	Leave    *float64 `json:"leave_ms,omitzero"` // the price of going elsewhere; nil if the session must not leave
	Stays    bool     `json:"session_stays"`     // the session is still bound to it after this turn
}

// LeftOut is an offered worker that is not a candidate.
type LeftOut struct {
	Worker uint64 `json:"worker"`
	Dial   string `json:"dial"`
	Why    string `json:"why"` // as a pool's verdict has it, or unreachable
}

// Explain returns the choice for a request without booking it, and leaves nothing behind. A
// query gets a worker even if all are full: its client will wait for that one.
func (s *Dispatcher) Explain(p *plan.Plan) *DryChoice {
	t := time.Now()
	rt := s.routeOf(p)
	rt.split.Of = &rt
	if own := s.checkModel(p); own != nil {
		return &DryChoice{Refused: own}
	}
	rt.offers = s.Pool.Peek(s.upstreams(p.HTTP), rt.repl)
	if own, ok := errors.AsType[*api.Refusal](rt.enter(true)); ok {
		return &DryChoice{Refused: own}
	}
	want := rt.Wants()
	among := s.Pool.Candidates(&want, rt.offers, nil, t)
	defer func() { s.Pool.Return(among) }()
	c := new(DryChoice)
	if len(among.Targets) == 0 && len(among.Full) > 0 {
		c.Full = true
		c.Waits = append(c.Waits, pool.WaitsForSlot)
		if p.Ext.QueryOnly() {
			s.Pool.Return(among)
			unlimited := want
			unlimited.Kind = worker.KindOther
			among = s.Pool.Candidates(&unlimited, rt.offers, nil, t)
		}
	}
	for i, v := range s.Pool.Judge(&want, rt.offers, t) {
		if w := rt.offers.Table.Rows[i].Worker; !slices.Contains(among.Workers, w) {
			why := v.String()
			if v == pool.OtherModels && w.Health.Reach().Away() {
				why = "unreachable" // nobody knows its models
			}
			c.LeftOut = append(c.LeftOut, LeftOut{Worker: w.ID, Dial: w.Dial, Why: why})
		}
	}
	if len(among.Targets) == 0 {
		if c.Full {
			c.Waits = append(c.Waits, s.Pool.WhyWait(&want, t)...)
		} else {
			c.Refused = &api.Refusal{
				API: p.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, Err: rt.errNobody(),
			}
		}
		return c
	}
	bound := rt.pick(c, among)
	if !c.Full && s.Pool.WouldHold(&want, among) {
		c.Waits = append(c.Waits, pool.WaitsForRoom)
	}
	if err := s.Pool.Late(&want, among, bound, c.Picked.Chosen, len(c.Waits) > 0); err != nil && !p.Ext.QueryOnly() {
		c.Refused = &api.Refusal{API: p.API, Status: http.StatusTooManyRequests, Code: api.CodeLate, Err: err}
	}
	if len(c.Waits) > 0 {
		c.Waits = append(c.Waits, s.Pool.WhyWait(&want, t)...)
	}
	return c
}

// pick chooses among candidates, and explains the choice. It returns the position of the target that the session or
// the request decided on; -1 if the policy chose.
func (rt *route) pick(c *DryChoice, among *pool.Candidates) (bound int) {
	rt.turn.Find(rt.plan.HTTP.Context())
	choice := rt.choice(among)
	sel := &among.Sel
	c.Picked = rt.Pool.Scheduler.Explain(among.At, choice.Request, among.Targets, choice.Bound, choice.Policy, sel)
	c.Candidates, c.Workers = slices.Clone(sel.Candidates), slices.Clone(among.Workers)
	c.Bound, c.Tier, c.Tokens = choice.Bound >= 0, among.Tier, sel.Tokens
	chosen := &sel.Candidates[c.Picked.Chosen]
	c.Reason, c.Unit = rt.reasonOf(c.Bound, chosen), kvscore.CostUnit(choice.Policy)
	if at, priced := rt.turn.BoundTarget(); at != (kvscore.Target{}) {
		h := &DryBoundTarget{Target: at, Position: sel.BoundTarget, Holds: sel.BoundTargetHolds()}
		h.Stays = c.Picked.Chosen == sel.BoundTarget || rt.turn.IsServedElsewhere() || priced && h.Holds
		if c.BoundTarget = h; priced && rt.fixed == nil {
			h.Leave = new(float64)
			for i := range sel.Candidates {
				*h.Leave = max(*h.Leave, sel.Candidates[i].Terms.Leave)
			}
		}
	}
	if !rt.offers.Table.Split {
		return choice.Bound
	}
	l, s := &DryPhases{Split: chosen.Split, Why: rt.split.WhyWhole()}, &rt.split
	if c.Phases = l; s.Prefill != nil {
		l.Prefill, l.Dial, l.Time = s.Forecast.Prefill, s.Prefill.Dial, s.Forecast.Time
	} else if l.Why == "" && !l.Split {
		l.Why = "no prefill worker is available"
	}
	return choice.Bound
}

// Prefill returns the target that would compute the prompt.
func (c *DryChoice) Prefill() kvscore.Target {
	if l := c.Phases; l != nil && l.Split && l.Prefill != (kvscore.Target{}) {
		return l.Prefill
	}
	return c.Candidates[c.Picked.Chosen].Target
}

// Overlap returns the most tokens of the prompt that a candidate holds.
func (c *DryChoice) Overlap() (most int64) {
	for i := range c.Candidates {
		most = max(most, c.Candidates[i].OverlapTokens)
	}
	return most
}

// AskTokenizer returns what asks a worker's engine for token ids, with the client's key. An answer
// longer than most bytes is none.
func (s *Dispatcher) AskTokenizer(ctx context.Context, p *plan.Plan, w *worker.Worker, most int64) engine.Post {
	return func(path string, body []byte) (int, []byte) {
		key := p.HTTP.Header["Authorization"]
		status, answer, err := s.Client.Fetch(ctx, w.Dial, http.MethodPost, path, body, key, most)
		if c := s.Logger.Check(zap.DebugLevel, "asked a worker for token ids"); c != nil {
			c.Write(zap.String("upstream", w.Dial), zap.String("path", path), zap.Int("status", status),
				zap.Int("bytes", len(answer)), zap.Error(err))
		}
		if err != nil {
			return 0, nil
		}
		return status, answer
	}
}
