package pool

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Wants is what a request needs of a worker, and its place in the queue. It is immutable.
type Wants struct {
	Model    string    // the worker must serve it, if any worker is known to
	Only     *Worker   // the one worker that may serve the request; nil = any
	Rank     int64     // the data-parallel rank, or AnyRank
	Workers  []uint64  // ids of the workers that the client allows; nil = all
	Taints   []string  // the worker must have all of these
	Isolated bool      // the engine must keep the caches of different salts apart, in this API
	Session  bool      // the engine must be able to hold a session, in this API
	API      string    // of the request
	Tried    []*Worker // the worker must be none of these
	Slot     bool      // the request takes one of the worker's slots
	Tier     int       // lower tiers leave the queue first
	Arrival  time.Time // orders a tier, earliest first; includes the priority's head start
}

// AnyRank is the Rank of a request that any rank may serve.
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

// ModelAmong returns the model that a request's worker must be known to serve. It is empty
// if no worker is known to, because engines often serve models under names that they do not
// list. If no worker lists an adapter of SGLang, base:adapter, its base counts.
func ModelAmong(rows []TableRow, model string) string {
	if model == "" {
		return ""
	}
	isServed := func(model string) bool {
		return slices.ContainsFunc(rows, func(row TableRow) bool { return row.Worker.KnownToServe(model) })
	}
	if isServed(model) {
		return model
	}
	if base, _, ok := strings.Cut(model, ":"); ok && isServed(base) {
		return base
	}
	return ""
}

// KnownToServe returns whether a worker is known to serve a model.
func (w *Worker) KnownToServe(model string) bool {
	yes, _ := w.Serves(model)
	return yes
}

// Fits returns whether a worker may serve the request. The model is that of ModelAmong. A
// worker that the request names may serve any model.
func (p *Pool) Fits(want *Wants, model string, w *Worker) bool {
	if want.Only != nil {
		return w == want.Only
	}
	return (model == "" || w.KnownToServe(model)) && p.Permits(want, w)
}

// Permits returns whether the client's constraints allow a worker.
func (p *Pool) Permits(want *Wants, w *Worker) bool {
	if want.Workers != nil && !slices.Contains(want.Workers, w.ID) || want.Rank >= int64(w.Ranks()) || !p.Isolates(want, w) || !p.holdsSessions(want, w) {
		return false
	}
	lacks := func(taint string) bool { return !slices.Contains(w.Tainted(), taint) }
	return !slices.ContainsFunc(want.Taints, lacks)
}

// Isolates returns whether the worker's engine isolates caches, if the request needs that.
func (p *Pool) Isolates(want *Wants, w *Worker) bool {
	if !want.Isolated {
		return true
	}
	return w.Engine().IsolatesCaches(want.API)
}

// holdsSessions returns whether the worker's engine can hold a session, if the request needs
// that.
func (p *Pool) holdsSessions(want *Wants, w *Worker) bool {
	if !want.Session {
		return true
	}
	return w.Engine().HoldsSessions(want.API)
}

// needsMore returns whether the request needs more of its worker than the model.
func (want *Wants) needsMore() bool {
	return want.Only != nil || want.Isolated || want.Session || want.Rank != AnyRank || want.Workers != nil || len(want.Taints) > 0
}

// fits is Fits with the result of needsMore, which is false for most requests.
func (p *Pool) fits(want *Wants, needsMore bool, model string, w *Worker) bool {
	if needsMore {
		return p.Fits(want, model, w)
	}
	return model == "" || w.KnownToServe(model)
}

// eligible appends the offered workers that may serve the request and were not tried. It
// leaves out workers that the pool has forgotten since the offer. A worker with several
// upstreams appears once, with an available one if there is any.
func (p *Pool) eligible(list []offer, want *Wants, o Offers) []offer {
	model, stale := ModelAmong(o.Table.Rows, want.Model), o.Table.Layout != p.Layout.Load()
	for i, row := range o.Table.Rows {
		w := row.Worker
		if stale && w != p.unnamed {
			w = p.Known(w.Dial)
		}
		if w == nil || slices.Contains(want.Tried, w) || !p.Fits(want, model, w) {
			continue
		}
		if row.Repeated {
			if j := slices.IndexFunc(list, func(s offer) bool { return s.worker == w }); j >= 0 {
				if !Available(list[j].up) {
					list[j].up = o.Ups[i]
				}
				continue
			}
		}
		list = append(list, offer{o.Ups[i], w})
	}
	return list
}

// Table maps each upstream of a list to its worker and the worker's targets. A
// configuration keeps the table of its last list to save look-ups. A table is immutable,
// but for Seen, and valid until Pool.Layout changes.
type Table struct {
	Layout uint64
	list   reverseproxy.UpstreamPool // a copy, because a source may change its list in place
	Rows   []TableRow                // by upstream
	Seen   atomic.Int64              // when a request last saw the workers, Unix seconds
}

// TableRow is the worker behind an upstream.
type TableRow struct {
	Worker   *Worker
	Targets  []kvscore.TargetRef // by rank
	Repeated bool                // an earlier upstream has the same worker
}

// IsOf returns whether a list has the same addresses as the table's list. A dynamic source
// makes a new list for each request.
func (t *Table) IsOf(list reverseproxy.UpstreamPool) bool {
	if len(list) != len(t.list) {
		return false
	}
	for i, up := range t.list {
		if list[i] != up && list[i].Dial != up.Dial {
			return false
		}
	}
	return true
}

// NewTable makes a table. repl fills in placeholders. lasting is false if other requests
// must not use the table, because an address has a placeholder or a worker is above
// maxOthers. A dry table makes no worker known to the pool.
func (p *Pool) NewTable(list reverseproxy.UpstreamPool, repl *caddy.Replacer, dry bool) (t *Table, lasting bool) {
	// Layout comes first: a change while the table is made must invalidate it.
	t = &Table{Layout: p.Layout.Load(), list: slices.Clone(list), Rows: make([]TableRow, len(list))}
	found := make(map[*Worker]struct{}, len(list))
	targets := make([]kvscore.Target, 0, len(list))
	ranks := make([]int, len(list))
	lasting = true
	for i, up := range list {
		dial, workerAt := up.Dial, p.Worker
		if strings.Contains(dial, "{") {
			dial, lasting = repl.ReplaceAll(dial, ""), false
		}
		if dry {
			workerAt = p.peek
		}
		w := workerAt(dial)
		_, again := found[w]
		found[w] = struct{}{}
		t.Rows[i].Worker, t.Rows[i].Repeated = w, again
		ranks[i] = w.Ranks()
		for rank := range ranks[i] {
			targets = append(targets, w.Target(rank))
		}
		lasting = lasting && w != p.unnamed
	}
	refs := p.Scheduler.Refs(targets)
	for i, n := range ranks {
		t.Rows[i].Targets, refs = refs[:n:n], refs[n:]
	}
	return t, lasting
}

// Scratch is the buffers of one choice. They grow with the pool, so requests share them.
// A request owns its scratch only while it chooses.
type Scratch struct {
	Sel       kvscore.Selection
	Targets   []kvscore.TargetRef
	Upstreams []*reverseproxy.Upstream // of targets
	Workers   []*Worker                // of targets
	Full      []*Worker                // left out only because they are full
	Factors   []float64                // of targets: the client's preferences
	Scored    kvscore.Request          // the request with these
	Shadow    []kvscore.Candidate
}

// TakeScratch returns buffers for one choice.
func (p *Pool) TakeScratch() *Scratch {
	s, ok := p.scratches.Get().(*Scratch)
	if !ok {
		s = &Scratch{Sel: kvscore.Selection{Rand: newRandom()}}
	}
	return s
}

// newRandom returns a source of randomness for one goroutine at a time.
func newRandom() *rand.Rand {
	return rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())) //nolint:gosec // choices are no secrets
}

// ReturnScratch returns the buffers to the pool.
func (p *Pool) ReturnScratch(s *Scratch) {
	s.Sel.Blocks, s.Sel.Override = nil, nil
	s.Scored = kvscore.Request{}
	p.scratches.Put(s)
}

// Resort says which worse workers a request may use.
type Resort struct{ Draining, Marked bool }

// resorts are in the order of preference. A mark ends soon, and a drain is the operator's
// wish.
var resorts = [...]Resort{{}, {Marked: true}, {Draining: true}, {Draining: true, Marked: true}}

// allows returns whether a request may use a worker at that resort.
func (r Resort) allows(w *Worker, t time.Time) bool {
	return (r.Draining || !w.Draining()) && (r.Marked || w.Health.Available(t))
}

// allowed returns whether a request may use the offer at a resort.
func (s offer) allowed(r Resort, t time.Time) bool { return Available(s.up) && r.allows(s.worker, t) }

// Available returns whether Caddy has an upstream available. An upstream of a dynamic
// source that Caddy has not seen yet has no host, and counts as available.
func Available(up *reverseproxy.Upstream) bool {
	return up.Host == nil || up.Available()
}

// Gather fills in the targets of workers that are available, not tried and not full. It
// returns the first resort that has any. If the queue granted a slot of a worker, the
// other workers count as full.
func (p *Pool) Gather(s *Scratch, want *Wants, model string, o Offers, granted *Worker, t time.Time) (used Resort, found bool) {
	for _, used = range resorts {
		p.gatherAt(s, want, model, o, granted, used, t)
		if len(s.Targets) > 0 {
			return used, true
		}
		if len(s.Full) > 0 {
			break // the request waits for them: the other workers are worse
		}
	}
	return Resort{}, false
}

// gatherAt is Gather at one resort.
func (p *Pool) gatherAt(s *Scratch, want *Wants, model string, o Offers, granted *Worker, used Resort, t time.Time) {
	targets, upstreams, workers := s.Targets[:0], s.Upstreams[:0], s.Workers[:0]
	s.Full = s.Full[:0]
	needsMore := want.needsMore()
	for i, up := range o.Ups {
		if !Available(up) {
			continue
		}
		row := &o.Table.Rows[i]
		w := row.Worker
		if row.Repeated && slices.Contains(workers, w) || slices.Contains(want.Tried, w) {
			continue
		}
		if !p.fits(want, needsMore, model, w) {
			continue
		}
		if w != granted {
			if !used.allows(w, t) {
				continue
			}
			if granted != nil || want.Slot && w.Slots.full() {
				s.Full = append(s.Full, w)
				continue
			}
		}
		for rank, target := range row.Targets {
			if want.Rank == AnyRank || want.Rank == int64(rank) {
				targets, upstreams, workers = append(targets, target), append(upstreams, up), append(workers, w)
			}
		}
	}
	s.Targets, s.Upstreams, s.Workers = targets, upstreams, workers
}
