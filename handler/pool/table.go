package pool

import (
	"slices"
	"strings"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Table holds the worker behind each upstream of a list, and the worker's targets. A
// look-up takes a lock and a map access per upstream, so a configuration keeps the table
// of its last list. A table is immutable, and valid until pool.layout changes.
type Table struct {
	Layout uint64
	list   reverseproxy.UpstreamPool // a copy: a source may change its own in place
	Rows   []TableRow                // by upstream
	Seen   atomic.Int64              // when a request saw the workers last, Unix seconds
}

type TableRow struct {
	Worker  *Worker
	Targets []kvscore.TargetRef // by rank
	Again   bool                // an earlier upstream has the same worker
}

// IsOf returns whether a list has the addresses of the table's list. A dynamic
// source makes a new list for each request.
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

// NewTable makes a table. lasting is false if the table must not be reused: an
// address has a placeholder, or a worker is beyond maxOthers. repl fills in the
// placeholders. A dry table makes no worker known to the pool.
func (p *Pool) NewTable(list reverseproxy.UpstreamPool, repl *caddy.Replacer, dry bool) (t *Table, lasting bool) {
	// the layout is read first: a later change invalidates the table
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
		t.Rows[i].Worker, t.Rows[i].Again = w, again
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
