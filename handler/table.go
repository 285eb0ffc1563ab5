package handler

import (
	"slices"
	"strings"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// table holds the worker behind each upstream of a list, and the worker's targets.
// Looking these up takes a lock and a map access per upstream, so a handler keeps
// the table of its last list. A table does not change. It is valid until
// pool.layout changes.
type table struct {
	layout uint64
	list   reverseproxy.UpstreamPool // a copy: a source may change its own in place
	rows   []tableRow                // by upstream
	met    atomic.Int64              // when the workers were met last, Unix seconds
}

type tableRow struct {
	worker  *worker
	targets []kvscore.TargetRef // by rank
	again   bool                // an earlier upstream has the same worker
}

// table returns the table of a list of upstreams. A dry route keeps its table: a
// worker which the pool does not know exists only there.
func (rt *route) table(list reverseproxy.UpstreamPool) *table {
	if rt.dryTable != nil && rt.dryTable.isOf(list) {
		return rt.dryTable
	}
	t := rt.lastTable.Load()
	if t == nil || t.layout != rt.pool.layout.Load() || !t.isOf(list) {
		var lasting bool
		if t, lasting = rt.newTable(list); lasting && !rt.dry {
			rt.lastTable.Store(t)
		}
	}
	if rt.dry {
		rt.dryTable = t
	}
	return t
}

// isOf returns whether a list has the addresses of the table's list. A dynamic
// source makes a new list for each request.
func (t *table) isOf(list reverseproxy.UpstreamPool) bool {
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

// meets tells whether the workers are to be met: a request of the same second has
// met those of a static list.
func (t *table) meets(rt *route, second int64) bool {
	return !rt.dry && (rt.proxy.DynamicUpstreams != nil || t.met.Swap(second) != second)
}

// newTable makes a table. lasting is false if the table must not be reused: an
// address has a placeholder, or a worker is beyond maxOthers.
func (rt *route) newTable(list reverseproxy.UpstreamPool) (t *table, lasting bool) {
	// the layout is read first: a later change invalidates the table
	t = &table{layout: rt.pool.layout.Load(), list: slices.Clone(list), rows: make([]tableRow, len(list))}
	met := make(map[*worker]struct{}, len(list))
	targets := make([]kvscore.Target, 0, len(list))
	ranks := make([]int, len(list))
	lasting = true
	for i, up := range list {
		w := rt.worker(up)
		_, again := met[w]
		met[w] = struct{}{}
		t.rows[i].worker, t.rows[i].again = w, again
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

// worker returns the worker behind an upstream. The request fills in the
// placeholders of its address.
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
