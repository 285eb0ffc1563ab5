package handler

import (
	"slices"
	"strings"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// table holds the worker behind each upstream of a list, and the worker's targets. A
// look-up takes a lock and a map access per upstream, so a configuration keeps the table
// of its last list. A table is immutable, and valid until pool.layout changes.
type table struct {
	layout uint64
	list   reverseproxy.UpstreamPool // a copy: a source may change its own in place
	rows   []tableRow                // by upstream
	seen   atomic.Int64              // when a request saw the workers last, Unix seconds
}

type tableRow struct {
	worker  *worker
	targets []kvscore.TargetRef // by rank
	again   bool                // an earlier upstream has the same worker
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

// newTable makes a table. lasting is false if the table must not be reused: an
// address has a placeholder, or a worker is beyond maxOthers. repl fills in the
// placeholders. A dry table makes no worker known to the pool.
func (p *pool) newTable(list reverseproxy.UpstreamPool, repl *caddy.Replacer, dry bool) (t *table, lasting bool) {
	// the layout is read first: a later change invalidates the table
	t = &table{layout: p.layout.Load(), list: slices.Clone(list), rows: make([]tableRow, len(list))}
	found := make(map[*worker]struct{}, len(list))
	targets := make([]kvscore.Target, 0, len(list))
	ranks := make([]int, len(list))
	lasting = true
	for i, up := range list {
		dial, workerAt := up.Dial, p.worker
		if strings.Contains(dial, "{") {
			dial, lasting = repl.ReplaceAll(dial, ""), false
		}
		if dry {
			workerAt = p.peek
		}
		w := workerAt(dial)
		_, again := found[w]
		found[w] = struct{}{}
		t.rows[i].worker, t.rows[i].again = w, again
		ranks[i] = w.ranks()
		for rank := range ranks[i] {
			targets = append(targets, w.target(rank))
		}
		lasting = lasting && w != p.unnamed
	}
	refs := p.scheduler.Refs(targets)
	for i, n := range ranks {
		t.rows[i].targets, refs = refs[:n:n], refs[n:]
	}
	return t, lasting
}
