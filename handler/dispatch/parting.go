package dispatch

import (
	"fmt"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// parting is whether a request is parted over two workers: one computes its prompt, the other
// the answer.
type parting struct {
	asked  bool           // for whole
	whole  string         // why the request goes whole; empty if it may be parted
	pinned *pool.Worker   // the one worker for the prefill that the request names
	failed []*pool.Worker // whose prefill legs failed
	tries  int            // pairs of legs that failed

	// of the last choice
	apart   kvscore.Apart
	prefill *pool.Worker // that the choice counts on; nil if none

	refused bool // a prefill worker refused the request, or did not hand it over

	blame  [2]*pool.Worker // a pair whose transfer failed, if it was not the request's own fault
	silent bool            // its decode leg was, and no more is known
}

// Conditions of pools with roles.
const (
	incidentNoPrefill   = "no prefill worker is available, and requests go whole to others"
	incidentOnlyPrefill = "only prefill workers are available, and they serve whole requests"
	incidentTransfers   = "transfers between a prefill and a decode worker fail, and requests avoid the pair"
	incidentNotHanded   = "prefill workers do not hand over their prompts, and requests go whole to others"
)

// maxPairsTried is how many pairs of workers a request tries before it goes whole.
const maxPairsTried = 2

// goesWhole returns whyWhole, asked once, or why the request goes whole after a failure.
func (rt *route) goesWhole() string {
	if p := &rt.parting; !p.asked {
		p.asked, p.whole = true, rt.whyWhole()
	}
	return rt.parting.whole
}

// again allows the request all pairs of workers once more.
func (p *parting) again() { p.asked, p.failed, p.tries = false, nil, 0 }

// whyWhole returns why the request is not parted, whatever the workers; empty if it may be.
func (rt *route) whyWhole() string {
	p, req := rt.plan, rt.plan.Request
	switch {
	case rt.Legs == kvscore.LegsNever:
		return "legs is never"
	case req == nil || p.Once != nil || req.Kind == api.None:
		return "the router does not know the prompt"
	case p.API.Work() != api.Generate:
		return "the API has no answer to decode"
	case req.Choices > 1 || req.Batch() || req.Answers() > 1:
		return "it has several answers"
	case req.Echoes || req.SkipsCache:
		return "it asks for something of the prompt's tokens, which only the engine that computes them knows"
	case req.ServerTools:
		return "the engine itself may call tools, and hands over the first turn only"
	case req.Media > 0 && rt.some(func(e *engine.Engine) bool { return e.Legs().TextOnly }):
		return "it has media, which the engines cannot hand over"
	case req.MaxTokens == 1 && rt.some((*engine.Engine).ServesWhole):
		return "its answer is one token"
	case rt.namesLegs():
		return "it names its transfer itself"
	case rt.holds() || p.Response != "":
		return "an engine holds what is before it"
	}
	if _, sole := p.PinsPrefill(); sole {
		return "it names one worker for both legs"
	}
	return ""
}

// some returns whether the engine of a worker of the pool is such.
func (rt *route) some(is func(*engine.Engine) bool) bool {
	return slices.ContainsFunc(rt.offers.Table.Rows, func(r pool.TableRow) bool {
		return is(r.Worker.Engine())
	})
}

// pinPrefill finds the worker that the request names for its prefill.
func (rt *route) pinPrefill() error {
	pins, sole := rt.plan.PinsPrefill()
	if !pins || sole {
		return nil
	}
	pin := &rt.plan.Pin
	field := "nvext.prefill_worker_id"
	if !pin.Prefill.Set {
		field = "nvext.prefill_dp_rank"
	}
	rt.lookUp()
	if why := rt.goesWhole(); why != "" {
		return rt.badPin("%s: the request cannot be parted: %s", field, why)
	}
	if !pin.Prefill.Set {
		if want := rt.prefillWants(); rt.closest(&want) != pool.Fits || !rt.offers.Table.Apart {
			return rt.badPin("%s: rank %d is not one of a worker for prefills", field, pin.PrefillRank.Value)
		}
		return nil
	}
	w := rt.offers.Worker(pin.Prefill.Value)
	switch {
	case w == nil:
		return rt.badPin("%s: no worker of this pool has the id %d", field, pin.Prefill.Value)
	case !w.IsPrefill():
		return rt.badPin("%s: worker %d is not for prefills, its role is %s", field, w.ID, w.Engine().Role())
	case pin.PrefillRank.Set && int64(pin.PrefillRank.Value) >= int64(w.Ranks()):
		return rt.badPin("nvext.prefill_dp_rank: worker %d has no rank %d, its ranks are 0 to %d",
			w.ID, pin.PrefillRank.Value, w.Ranks()-1)
	}
	rt.parting.pinned = w
	return nil
}

// namesLegs returns whether a trusted client parts the request itself.
func (rt *route) namesLegs() bool {
	p := rt.plan
	return p.Request != nil && p.Request.NamesLegs && p.Grants&nvext.Pins != 0
}

// part returns which part of the request its worker must serve.
func (rt *route) part() pool.Part {
	switch {
	case rt.plan.API == nil || !rt.plan.ShowsHealth, rt.namesLegs():
		return pool.Any
	case rt.hasPrefill():
		return pool.Answer
	}
	return pool.Whole
}

// hasPrefill returns whether the request may be parted now.
func (rt *route) hasPrefill() bool {
	t := rt.offers.Table
	if t == nil || !t.Apart || rt.goesWhole() != "" {
		return false
	}
	want, now := rt.prefillWants(), time.Now()
	for i, v := range rt.Pool.Judge(&want, rt.offers, now) {
		if e := t.Rows[i].Worker.Engine(); v.Possible() && e.Parts(rt.plan.Name) {
			return true
		}
	}
	return false
}

// prefillWants returns the requirements on the worker of the prefill leg.
func (rt *route) prefillWants() pool.Wants {
	want := rt.requires()
	want.Part, want.Only, want.Rank, want.Tried = pool.Prefill, rt.parting.pinned, pool.AnyRank, rt.parting.failed
	if r := rt.plan.Pin.PrefillRank; r.Set {
		want.Rank = int64(r.Value)
	}
	if want.Only != nil && slices.Contains(want.Tried, want.Only) {
		want.Tried = nil // there is no other
	}
	want.Kind = pool.KindPlain
	return want
}

// rule returns the rule by which the request is parted.
func (rt *route) rule() kvscore.Legs {
	if pins, _ := rt.plan.PinsPrefill(); pins {
		return kvscore.LegsAlways
	}
	return rt.Legs
}

// partings returns whether and how the candidates may be parted, for the scheduler.
func (rt *route) partings(c *pool.Candidates) (kvscore.Apart, []kvscore.Way) {
	p := &rt.parting
	p.prefill, p.apart = nil, kvscore.Apart{}
	if rt.offers.Table == nil || !rt.offers.Table.Apart || rt.goesWhole() != "" {
		return p.apart, nil
	}
	want, full := rt.prefillWants(), false
	p.apart, p.prefill, full = rt.Pool.Forecast(&want, rt.offers, c.At, &rt.plan.Score, rt.policy(), rt.rule())
	if p.prefill == nil && !full {
		rt.Pool.Incidents.Raise(c.At, incidentNoPrefill, rt.Pool.Logger)
		return p.apart, nil
	}
	if rt.lacksPrefill(c.At) {
		rt.Pool.Incidents.Raise(c.At, incidentNoPrefill, rt.Pool.Logger)
	}
	if full {
		p.apart.Legs = rt.rule()
	}
	c.Ways = slices.Grow(c.Ways[:0], len(c.Workers))[:len(c.Workers)]
	for i, w := range c.Workers {
		c.Ways[i] = rt.way(w, c.At)
	}
	return p.apart, c.Ways
}

// way returns how a worker can serve the request. If all prefill workers are full, only a
// request that must be parted waits for them.
func (rt *route) way(w *pool.Worker, t time.Time) kvscore.Way {
	p := &rt.parting
	switch {
	case !w.ServesWhole():
		return kvscore.OnlyParted
	case !w.IsDecode():
		return kvscore.OnlyWhole
	case rt.lacksPrefill(t):
		return kvscore.OnlyWhole
	case p.prefill == nil:
		if rt.rule() == kvscore.LegsAlways {
			return kvscore.EitherWay
		}
		return kvscore.OnlyWhole
	case !p.prefill.Engine().Pairs(w.Engine(), rt.plan.Name) || rt.Pool.Avoids(p.prefill, w, t):
		return kvscore.OnlyWhole
	}
	return kvscore.EitherWay
}

// lacksPrefill returns whether even the best prefill worker is marked down or drains. A request that names
// it goes there nevertheless.
func (rt *route) lacksPrefill(t time.Time) bool {
	p := &rt.parting
	pins, _ := rt.plan.PinsPrefill()
	return p.prefill != nil && !pins && !p.prefill.TakesRequests(t)
}

// pairless are the offered workers that cannot prefill for a decode worker.
func (rt *route) pairless(decode *pool.Worker) (list []*pool.Worker) {
	for i := range rt.offers.Table.Rows {
		if w := rt.offers.Table.Rows[i].Worker; w.IsPrefill() && !w.Engine().Pairs(decode.Engine(), rt.plan.Name) {
			list = append(list, w)
		}
	}
	return list
}

// errUnparted is the error of a request that only engines for one leg could serve.
func (rt *route) errUnparted() error {
	why := rt.goesWhole()
	if why == "" {
		why = "no prefill worker is available whose engine can part requests of the API " + rt.plan.Name
	}
	return fmt.Errorf("the engines of the available workers serve only one leg of requests, and this request is not parted: %s", why)
}
