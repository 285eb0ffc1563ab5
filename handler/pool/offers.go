package pool

import (
	"iter"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Offers are the upstreams that the proxy offers for a request, with their workers.
type Offers struct {
	Ups   reverseproxy.UpstreamPool
	Table *Table
}

// Table maps each upstream of a list to its worker and the worker's targets. A table is
// immutable, but for seen, and valid until Pool.layout changes.
type Table struct {
	layout uint64
	list   reverseproxy.UpstreamPool // a copy, because a source may change its list in place
	Rows   []TableRow                // by upstream
	Split  bool                      // some workers are for prefills or for decodes
	seen   atomic.Int64              // when a request last saw the workers, Unix seconds
}

// Workers yields the workers, each one once.
func (t *Table) Workers() iter.Seq[*worker.Worker] {
	return func(yield func(*worker.Worker) bool) {
		for i := range t.Rows {
			if !t.Rows[i].Repeated && !yield(t.Rows[i].Worker) {
				return
			}
		}
	}
}

// TableRow is the worker behind an upstream.
type TableRow struct {
	Worker   *worker.Worker
	Targets  []kvscore.TargetRef // by rank
	Repeated bool                // an earlier upstream has the same worker
	Alone    bool                // it is for one phase, and no offered worker of the same version is for the other
}

// Peek returns the offers of a list of upstreams, and makes no worker known to the pool.
func (r *registry) Peek(list reverseproxy.UpstreamPool, repl *caddy.Replacer) Offers {
	t, _ := r.tableOf(list, repl, r.peek)
	return Offers{list, t}
}

// isOf returns whether a list has the same addresses as the table's list. A dynamic source
// makes a new list for each request.
func (t *Table) isOf(list reverseproxy.UpstreamPool) bool {
	return slices.EqualFunc(list, t.list, func(a, b *reverseproxy.Upstream) bool { return a == b || a.Dial == b.Dial })
}

// tableOf makes a table of the workers that workerAt returns. lasting is false if other requests
// must not use the table, because an address has a placeholder or a worker is above
// maxOverflow.
func (r *registry) tableOf(
	list reverseproxy.UpstreamPool, repl *caddy.Replacer, workerAt func(dial string) *worker.Worker,
) (t *Table, lasting bool) {
	layout := r.layout.Load() // first: a change while the table is made must invalidate it
	workers := make([]*worker.Worker, len(list))
	lasting = true
	for i, up := range list {
		dial := up.Dial
		if strings.Contains(dial, "{") {
			dial, lasting = repl.ReplaceAll(dial, ""), false
		}
		workers[i] = workerAt(dial)
		lasting = lasting && workers[i] != r.overflow
	}
	return r.newTable(list, workers, layout), lasting
}

func (r *registry) newTable(list reverseproxy.UpstreamPool, workers []*worker.Worker, layout uint64) *Table {
	t := &Table{layout: layout, list: slices.Clone(list), Rows: make([]TableRow, len(list))}
	found := make(map[*worker.Worker]struct{}, len(list))
	targets := make([]kvscore.Target, 0, len(list))
	ranks := make([]int, len(list))
	for i, w := range workers {
		_, again := found[w]
		found[w] = struct{}{}
		t.Rows[i].Worker, t.Rows[i].Repeated = w, again
		t.Split = t.Split || w.IsPrefill() || w.IsDecode()
		ranks[i] = w.Ranks()
		for rank := range ranks[i] {
			targets = append(targets, w.Target(rank))
		}
	}
	if t.Split {
		t.findAlone()
	}
	refs := r.Scheduler.Refs(targets...)
	for i, n := range ranks {
		t.Rows[i].Targets, refs = refs[:n:n], refs[n:]
	}
	return t
}

// findAlone finds the workers for one phase that have no partner. Updates of engines make some.
func (t *Table) findAlone() {
	for i := range t.Rows {
		w := t.Rows[i].Worker
		t.Rows[i].Alone = (w.IsPrefill() || w.IsDecode()) && !slices.ContainsFunc(t.Rows, func(other TableRow) bool {
			o := other.Worker
			return w.IsPrefill() == o.IsDecode() && w.IsDecode() == o.IsPrefill() && w.Engine().Alike(o.Engine())
		})
	}
}

// renewed returns the offers with the workers of now. A worker that was forgotten is known
// again, because a request needs it.
func (r *registry) renewed(o Offers) Offers {
	layout := r.layout.Load()
	if o.Table.layout == layout {
		return o // no worker nor its ranks have changed
	}
	workers := make([]*worker.Worker, len(o.Ups))
	for i := range o.Table.Rows {
		if workers[i] = o.Table.Rows[i].Worker; workers[i] != r.overflow { // which has no address of its own
			workers[i] = r.Worker(workers[i].Dial)
		}
	}
	return Offers{o.Ups, r.newTable(o.Ups, workers, layout)}
}

// Worker returns the offered worker with an id, nil if there is none.
func (o Offers) Worker(id uint64) *worker.Worker {
	if o.Table != nil {
		for i := range o.Table.Rows {
			if w := o.Table.Rows[i].Worker; w.ID == id {
				return w
			}
		}
	}
	return nil
}

// served returns the model that a request's worker must be known to serve. It is empty
// if no worker is known to, because engines often serve models under names that they do not
// list. If no worker lists an adapter of SGLang, base:adapter, its base counts.
func (o Offers) served(model string) string {
	if model == "" {
		return ""
	}
	isServed := func(model string) bool {
		return slices.ContainsFunc(o.Table.Rows, func(row TableRow) bool {
			return row.Worker.KnownToServe(model) && !row.Worker.IsBackup()
		})
	}
	if isServed(model) {
		return model
	}
	if base, _, ok := strings.Cut(model, ":"); ok && isServed(base) {
		return base
	}
	return ""
}

// See records that a request was offered the workers. For a static list, one request a second
// does it.
func (r *registry) See(o Offers, t time.Time, dynamic bool) {
	second := t.Unix()
	if r.lastRequest.Load() != second { // all processors share what is only read
		r.lastRequest.Store(second)
	}
	if o.Table.seen.Swap(second) == second && !dynamic {
		return
	}
	for i := range o.Table.Rows {
		o.Table.Rows[i].Worker.See(second)
	}
}
