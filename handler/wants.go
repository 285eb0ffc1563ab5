package handler

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
	Only     *worker   // the one worker that may serve the request; nil = any
	Rank     int64     // the data-parallel rank; anyRank = any
	Workers  []uint64  // ids of the workers that the client allows; nil = all
	Taints   []string  // the worker must have all of these
	Isolated bool      // the engine must keep the caches of different salts apart
	API      string    // in this API
	Tried    []*worker // none of these
	Slot     bool      // the request takes one of the worker's slots
	Dry      bool      // the choice is only explained, and changes nothing
	Tier     int       // lower tiers leave the queue first
	Arrival  time.Time // within a tier, earlier requests do; includes the priority's head start
}

const anyRank = -1

// offers are the upstreams that the proxy offers for a request, with their workers.
type offers struct {
	ups   reverseproxy.UpstreamPool
	table *table
}

// offer is one worker that may serve a request, and its upstream.
type offer struct {
	up     *reverseproxy.Upstream
	worker *worker
}

// modelAmong returns the model that limits the workers to those that are known to serve
// it, empty if no worker is: engines often serve models by names that they do not list.
// SGLang's adapters, base:adapter, stand for their base if no worker lists them.
func modelAmong(rows []tableRow, model string) string {
	if model == "" {
		return ""
	}
	isServed := func(model string) bool {
		return slices.ContainsFunc(rows, func(row tableRow) bool { return row.worker.isKnownToServe(model) })
	}
	if isServed(model) {
		return model
	}
	if base, _, ok := strings.Cut(model, ":"); ok && isServed(base) {
		return base
	}
	return ""
}

// isKnownToServe returns whether a worker is known to serve a model.
func (w *worker) isKnownToServe(model string) bool {
	yes, _ := w.serves(model)
	return yes
}

// fits returns whether a worker may serve the request, for a model of modelAmong. A
// worker that the request names may serve any model.
func (p *pool) fits(want *Wants, model string, w *worker) bool {
	if want.Only != nil {
		return w == want.Only
	}
	return (model == "" || w.isKnownToServe(model)) && p.permits(want, w)
}

// permits returns whether the client's constraints allow a worker.
func (p *pool) permits(want *Wants, w *worker) bool {
	if want.Workers != nil && !slices.Contains(want.Workers, w.id) || want.Rank >= int64(w.ranks()) || !p.isolates(want, w) {
		return false
	}
	for _, taint := range want.Taints {
		if !slices.Contains(w.tainted(), taint) {
			return false
		}
	}
	return true
}

// tainted returns the taints that the operator gave to the worker.
func (w *worker) tainted() []string {
	if t := w.taints.Load(); t != nil {
		return *t
	}
	return nil
}

// isolates returns whether the worker's engine keeps caches apart, if that is needed.
func (p *pool) isolates(want *Wants, w *worker) bool {
	if !want.Isolated {
		return true
	}
	e := p.engineOf(w)
	return e.IsolatesCaches(want.API)
}

// isChoosy returns whether workers may be unfit for another reason than their models.
func (want *Wants) isChoosy() bool {
	return want.Only != nil || want.Isolated || want.Rank != anyRank || want.Workers != nil || len(want.Taints) > 0
}

// eligible appends the offered workers that may serve the request and were not tried.
// Workers that the pool has forgotten since the offer are left out.
func (p *pool) eligible(list []offer, want *Wants, o offers) []offer {
	model, stale := modelAmong(o.table.rows, want.Model), o.table.layout != p.layout.Load()
	for i, row := range o.table.rows {
		w := row.worker
		if stale && w != p.unnamed {
			w = p.known(w.dial)
		}
		if w != nil && !row.again && !slices.Contains(want.Tried, w) && p.fits(want, model, w) {
			list = append(list, offer{o.ups[i], w})
		}
	}
	return list
}

// Reasons why a worker drains, as bits of worker.drain.
const (
	drainConfigured uint32 = 1 << iota
	drainAsked             // by the admin API
)

// draining returns whether the worker gets no new requests.
func (w *worker) draining() bool { return w.drain.Load() != 0 }
