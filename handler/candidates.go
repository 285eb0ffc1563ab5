package handler

import (
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Who drains a worker, as bits of worker.drain.
const (
	drainConfigured uint32 = 1 << iota
	drainAsked             // by the admin API
)

// draining tells whether the worker is to get no new requests.
func (w *worker) draining() bool { return w.drain.Load() != 0 }

// resort says which workers are made use of for want of better ones.
type resort struct{ draining, marked bool }

// resorts are in the order of preference. A mark is over soon, and a drain is
// the operator's wish: it goes before.
var resorts = [...]resort{{}, {marked: true}, {draining: true}, {draining: true, marked: true}}

// allows tells whether a worker may be used, at that resort.
func (r resort) allows(w *worker, t time.Time) bool {
	return (r.draining || !w.draining()) && (r.marked || w.health.available(t))
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

// gather fills in the targets to choose from: workers that are available and
// were not tried; of these, those that are not draining and did well lately, if
// there are any; of these, those that are not full. It tells what it had to
// resort to.
func (rt *route) gather(pool reverseproxy.UpstreamPool, t time.Time) (used resort, found bool) {
	for _, used = range resorts {
		rt.targets, rt.upstreams, rt.workers = rt.targets[:0], rt.upstreams[:0], rt.workers[:0]
		rt.wait.full = rt.wait.full[:0]
		for _, up := range pool {
			if !available(up) {
				continue
			}
			w := rt.worker(up)
			if !rt.dry {
				w.seen.Store(t.Unix())
				rt.h.met(w)
			}
			if slices.Contains(rt.tried, w) || slices.Contains(rt.workers, w) || !rt.fits(w) {
				continue
			}
			if !used.allows(w, t) && (w != rt.wait.reserved || !rt.wait.worse) {
				continue
			}
			if rt.isFull(w) {
				rt.wait.full = append(rt.wait.full, w)
				continue
			}
			for rank := range w.ranks() {
				if !rt.mayUse(rank) {
					continue
				}
				rt.targets = append(rt.targets, w.target(rank))
				rt.upstreams = append(rt.upstreams, up)
				rt.workers = append(rt.workers, w)
			}
		}
		if len(rt.targets) > 0 {
			return used, true
		}
		if len(rt.wait.full) > 0 {
			break // they are waited for: what is left is worse
		}
	}
	return resort{}, false
}

// available tells whether the proxy takes an upstream to be. Those of a dynamic
// source that the proxy has not seen yet have no host, and nothing against them.
func available(up *reverseproxy.Upstream) bool {
	return up.Host == nil || up.Available()
}
