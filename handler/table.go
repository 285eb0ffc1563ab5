package handler

import (
	"maps"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// table is what a list of upstreams stands for: the worker behind each of them,
// and its targets. To find these takes a lock and a map access for each upstream,
// so that a handler keeps the table of its last list. A table does not change; it
// holds as long as pool.layout.
type table struct {
	layout uint64
	list   reverseproxy.UpstreamPool
	rows   []tableRow        // of each upstream
	models []map[string]bool // the different sets of models that workers serve
}

type tableRow struct {
	worker  *worker
	targets []kvscore.TargetRef // by rank
	again   bool                // an earlier upstream has the same worker

	served     int // in table.models
	told       *modelList
	configured *map[string]bool
}

// table returns the table of a list of upstreams.
func (rt *route) table(list reverseproxy.UpstreamPool) *table {
	if last := rt.h.table.Load(); last != nil && last.layout == rt.pool.layout.Load() && last.isOf(list) {
		return last
	}
	t, lasting := rt.newTable(list)
	if lasting && !rt.dry {
		rt.h.table.Store(t)
	}
	return t
}

// isOf tells whether a list is the table's, or has the same addresses: a dynamic
// source makes a new list for each request.
func (t *table) isOf(list reverseproxy.UpstreamPool) bool {
	if len(list) != len(t.list) {
		return false
	}
	if len(list) == 0 || &list[0] == &t.list[0] {
		return true
	}
	for i, up := range list {
		if up.Dial != t.list[i].Dial {
			return false
		}
	}
	return true
}

// newTable makes a table. It is not lasting if another request may find other
// workers behind the same list, though the pool's layout is the same: for
// placeholders, or where there are more workers than are told apart.
func (rt *route) newTable(list reverseproxy.UpstreamPool) (t *table, lasting bool) {
	// the layout first: what changes from now on makes the table void
	t = &table{layout: rt.pool.layout.Load(), list: list, rows: make([]tableRow, len(list))}
	met := make(map[*worker]struct{}, len(list))
	targets := make([]kvscore.Target, 0, len(list))
	ranks := make([]int, len(list))
	lasting = true
	for i, up := range list {
		w := rt.worker(up)
		_, again := met[w]
		met[w] = struct{}{}
		t.rows[i].worker, t.rows[i].again = w, again
		t.group(&t.rows[i])
		ranks[i] = w.ranks()
		for rank := range ranks[i] {
			targets = append(targets, w.target(rank))
		}
		if w == rt.pool.unnamed || strings.Contains(up.Dial, "{") {
			lasting = false
		}
	}
	refs := rt.pool.scheduler.Refs(targets)
	for i, n := range ranks {
		t.rows[i].targets, refs = refs[:n:n], refs[n:]
	}
	return t, lasting
}

// group finds the set of models that the row's worker serves.
func (t *table) group(row *tableRow) {
	row.told, row.configured = row.worker.models.Load(), row.worker.configured.Load()
	var models map[string]bool
	if row.configured != nil {
		models = *row.configured
	} else if row.told != nil {
		models = row.told.ids
	}
	row.served = slices.IndexFunc(t.models, func(m map[string]bool) bool { return maps.Equal(m, models) })
	if row.served < 0 {
		row.served = len(t.models)
		t.models = append(t.models, models)
	}
}

// serve appends for each of t.models whether the model is in it.
func (t *table) serve(model string, list []bool) []bool {
	for _, models := range t.models {
		list = append(list, models[model])
	}
	return list
}

// serves tells whether the row's worker serves a model, of which serve has
// returned by. fresh is false if the worker's models are not those of the table
// any more.
func (row *tableRow) serves(model string, by []bool) (yes, fresh bool) {
	w := row.worker
	if w.models.Load() == row.told && w.configured.Load() == row.configured {
		return by[row.served], true
	}
	yes, _ = w.serves(model)
	return yes, false
}

// worker returns the worker behind an upstream. Placeholders in its address may
// stand for another one with each request.
func (rt *route) worker(up *reverseproxy.Upstream) *worker {
	dial := up.Dial
	if strings.Contains(dial, "{") {
		dial = rt.repl.ReplaceAll(dial, "")
	}
	if rt.dry {
		return rt.pool.peek(dial)
	}
	return rt.pool.worker(dial)
}
