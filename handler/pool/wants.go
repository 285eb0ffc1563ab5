package pool

import (
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Wants is what a request needs of a worker, and its place in the queue. It is
// immutable, so that the queue can evaluate it without the request.
type Wants struct {
	Model    string    // if any worker is known to serve it, the worker must be
	Only     *Worker   // the one worker that may serve the request; nil = any
	Rank     int64     // the data-parallel rank; anyRank = any
	Workers  []uint64  // ids of the workers that the client allows; nil = all
	Taints   []string  // the worker must have all of these
	Isolated bool      // the engine must keep the caches of different salts apart
	API      string    // in this API
	Tried    []*Worker // none of these
	Slot     bool      // the request takes one of the worker's slots
	Dry      bool      // the choice is only explained, and changes nothing
	Tier     int       // lower tiers leave the queue first
	Arrival  time.Time // within a tier, earlier requests do; includes the priority's head start
}

const AnyRank = -1

// Offers are the upstreams that the proxy offers for a request, with their workers.
type Offers struct {
	Ups   reverseproxy.UpstreamPool
	Table *Table
}

// offer is one worker that may serve a request, and its upstream.
type offer struct {
	up     *reverseproxy.Upstream
	worker *Worker
}

// ModelAmong returns the model that limits the workers to those that are known to serve
// it, empty if no worker is: engines often serve models by names that they do not list.
// SGLang's adapters, base:adapter, stand for their base if no worker lists them.
func ModelAmong(rows []TableRow, model string) string {
	if model == "" {
		return ""
	}
	isServed := func(model string) bool {
		return slices.ContainsFunc(rows, func(row TableRow) bool { return row.Worker.IsKnownToServe(model) })
	}
	if isServed(model) {
		return model
	}
	if base, _, ok := strings.Cut(model, ":"); ok && isServed(base) {
		return base
	}
	return ""
}

// IsKnownToServe returns whether a worker is known to serve a model.
func (w *Worker) IsKnownToServe(model string) bool {
	yes, _ := w.Serves(model)
	return yes
}

// Fits returns whether a worker may serve the request, for a model of modelAmong. A
// worker that the request names may serve any model.
func (p *Pool) Fits(want *Wants, model string, w *Worker) bool {
	if want.Only != nil {
		return w == want.Only
	}
	return (model == "" || w.IsKnownToServe(model)) && p.Permits(want, w)
}

// Permits returns whether the client's constraints allow a worker.
func (p *Pool) Permits(want *Wants, w *Worker) bool {
	if want.Workers != nil && !slices.Contains(want.Workers, w.ID) || want.Rank >= int64(w.Ranks()) || !p.Isolates(want, w) {
		return false
	}
	for _, taint := range want.Taints {
		if !slices.Contains(w.Tainted(), taint) {
			return false
		}
	}
	return true
}

// Tainted returns the taints that the operator gave to the worker.
func (w *Worker) Tainted() []string {
	if t := w.taints.Load(); t != nil {
		return *t
	}
	return nil
}

// Isolates returns whether the worker's engine keeps caches apart, if that is needed.
func (p *Pool) Isolates(want *Wants, w *Worker) bool {
	if !want.Isolated {
		return true
	}
	e := p.EngineOf(w)
	return e.IsolatesCaches(want.API)
}

// isChoosy returns whether workers may be unfit for another reason than their models.
func (want *Wants) isChoosy() bool {
	return want.Only != nil || want.Isolated || want.Rank != AnyRank || want.Workers != nil || len(want.Taints) > 0
}

// eligible appends the offered workers that may serve the request and were not tried.
// Workers that the pool has forgotten since the offer are left out.
func (p *Pool) eligible(list []offer, want *Wants, o Offers) []offer {
	model, stale := ModelAmong(o.Table.Rows, want.Model), o.Table.Layout != p.Layout.Load()
	for i, row := range o.Table.Rows {
		w := row.Worker
		if stale && w != p.unnamed {
			w = p.Known(w.Dial)
		}
		if w != nil && !row.Again && !slices.Contains(want.Tried, w) && p.Fits(want, model, w) {
			list = append(list, offer{o.Ups[i], w})
		}
	}
	return list
}

// Reasons why a worker drains, as bits of worker.drain.
const (
	DrainConfigured uint32 = 1 << iota
	DrainAsked             // by the admin API
)

// Draining returns whether the worker gets no new requests.
func (w *Worker) Draining() bool { return w.Drain.Load() != 0 }
