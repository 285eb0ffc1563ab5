package handler

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const (
	// probeEvery is how often a worker is probed: asked for its models, or at least
	// connected to.
	probeEvery = 4 * time.Second
	// probeTick is how often a worker is probed that refuses connections.
	probeTick = time.Second
	// liveCheck is how often a provisioned configuration checks whether it serves.
	liveCheck = 20 * time.Millisecond
	// probeTimeout is how long a worker may take to answer a probe.
	probeTimeout = 2 * time.Second
	// firstWait is how long after the start requests may wait for the first probes.
	firstWait = 500 * time.Millisecond
	// idleAfter is how long a pool must have no request to be idle. Its workers may
	// sleep, or cost money for each question: they are asked as rarely as those that
	// do not answer. They are connected to all the same.
	idleAfter = 10 * time.Minute
)

// probes are a handler's probes of its workers, from when its configuration serves
// until that ends.
type probes struct {
	wanted chan struct{} // a worker is to be probed at once
	first  chan struct{} // closed after the first probes, or after firstWait
}

// adoptWhenLive adopts the pool once the configuration serves, without waiting for
// its first request: a configuration that is only validated, or is rejected, asks
// no worker and changes nothing. Caddy has no hook for that: apps are started, and
// the event "started" is emitted, when the configuration may yet be rejected. Each
// configuration has a metrics registry of its own, which identifies it.
func (h *Handler) adoptWhenLive(ctx context.Context, registry *prometheus.Registry) {
	ticker := time.NewTicker(liveCheck)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if active := caddy.ActiveContext(); active.GetMetricsRegistry() == registry {
			h.adopt()
			return
		}
	}
}

// startProbes begins to probe the workers, until the configuration ends.
func (h *Handler) startProbes() {
	ctx := h.ctx
	if ctx == nil {
		return // never provisioned, as in tests
	}
	go func() {
		h.firstProbes(ctx)
		close(h.probes.first)
		ticker := time.NewTicker(probeTick)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			case <-h.probes.wanted:
			}
			h.probeDue(ctx)
		}
	}()
}

// firstProbes probes all workers. It returns after firstWait at the latest.
func (h *Handler) firstProbes(ctx context.Context) {
	over := make(chan struct{})
	go func() {
		var under sync.WaitGroup
		for _, w := range h.own() {
			if w.probedFor.Swap(h.config) == h.config {
				under.Go(func() { <-w.probed }) // another handler of the pool probes it
				continue
			}
			w.probedAt.Store(now().UnixNano())
			began := w.probing.CompareAndSwap(false, true)
			under.Go(func() {
				h.probe(ctx, w, true)
				if began {
					w.probing.Store(false)
				}
			})
		}
		under.Wait()
		h.pool.agreeOnBlocks()
		close(over)
	}()
	timer := time.NewTimer(firstWait)
	defer timer.Stop()
	select {
	case <-over:
	case <-timer.C:
		h.pool.agreeOnBlocks() // among those that answered in time
	case <-ctx.Done():
	}
}

// awaitProbes lets a request that comes right after the start wait for the first
// probes. A plan then uses what is known.
func (h *Handler) awaitProbes(ctx context.Context) {
	if h.ctx == nil {
		return
	}
	select {
	case <-h.probes.first:
	case <-ctx.Done():
	}
}

// own returns the workers that this handler probes: its upstreams, and of a
// dynamic source those that it returned lately. Other workers of the pool may be
// reached in another way, or have an address that a client chose.
func (h *Handler) own() []*worker {
	if h.ReverseProxy.DynamicUpstreams != nil {
		list := h.pool.all()
		return slices.DeleteFunc(list, func(w *worker) bool {
			return w.by.Load() != h || h.pool.used.Load()-w.seen.Load() > int64(workerGrace/time.Second)
		})
	}
	list := make([]*worker, 0, len(h.ReverseProxy.Upstreams))
	for _, up := range h.ReverseProxy.Upstreams {
		if w := h.pool.known(up.Dial); w != nil {
			list = append(list, w)
		}
	}
	return list
}

// met records that a dynamic source gave a worker to this handler. A new worker is
// probed at once.
func (h *Handler) met(w *worker) {
	if h.ReverseProxy.DynamicUpstreams == nil || w.by.Load() == h {
		return
	}
	w.by.Store(h)
	if !w.wasProbed() {
		h.probes.soon()
	}
}

// soon has the workers that are due probed at once.
func (p *probes) soon() {
	select {
	case p.wanted <- struct{}{}:
	default: // it is about to be done
	}
}

// probeDue starts a probe of each worker that is due.
func (h *Handler) probeDue(ctx context.Context) {
	for _, w := range h.own() {
		t, last := now().UnixNano(), w.probedAt.Load()
		if w.probing.Load() || t-last < int64(pauseOf(w)) || !w.probedAt.CompareAndSwap(last, t) {
			continue // another handler of the pool probes it, or has just done so
		}
		w.probing.Store(true)
		ask := t-w.asked.Load() >= int64(h.pool.restOf(w))
		go func() {
			told := h.probe(ctx, w, ask)
			w.probing.Store(false)
			if told {
				h.pool.agreeOnBlocks()
			}
		}()
	}
}

// probe finds out whether a worker can be reached. If ask is set, it asks what the
// worker serves and, if that is due, what it is: told is whether it did the latter.
func (h *Handler) probe(whole context.Context, w *worker, ask bool) (told bool) {
	defer w.markProbed()
	ctx, cancel := context.WithTimeout(whole, probeTimeout)
	defer cancel()
	if ask {
		w.asked.Store(now().UnixNano())
		if h.asksModels(w) {
			return h.ask(ctx, w) && h.detect(whole, w)
		}
		if h.detect(whole, w) {
			return true
		}
	}
	h.connect(ctx, w)
	return false
}

// markProbed records the end of a probe.
func (w *worker) markProbed() { w.probedOnce.Do(func() { close(w.probed) }) }

// wasProbed tells whether a probe of the worker has ended.
func (w *worker) wasProbed() bool {
	select {
	case <-w.probed:
		return true
	default:
		return false
	}
}

// asksModels tells whether a worker is asked which models it serves. If the
// operator lists them, it is asked only to end an absence.
func (h *Handler) asksModels(w *worker) bool {
	return w.configured.Load() == nil ||
		w.health.reach() == unresponsive && h.pool.settings.Load().worker(w.dial).Engine != engine.Other
}

// connect opens and closes a connection to a worker that is not asked anything now,
// which costs the worker nothing. It does nothing for a worker behind a forward
// proxy, where a connection shows nothing, or with TLS, which would log a failed
// handshake.
func (h *Handler) connect(ctx context.Context, w *worker) {
	ctx, host, _, err := h.toWorker(ctx, w)
	if err != nil {
		return // asking it tells
	}
	outer := h.ReverseProxy.Transport.(*transport).HTTPTransport
	if outer.TLSEnabled() || slices.Contains(outer.Versions, "3") {
		return
	}
	t := outer.Transport
	if t.Proxy != nil {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+host, nil)
		if err != nil {
			return
		}
		if via, err := t.Proxy(req); via != nil || err != nil {
			return
		}
	}
	info, _ := reverseproxy.GetDialInfo(ctx)
	conn, err := t.DialContext(ctx, info.Network, info.Address)
	if err == nil {
		conn.Close()
		h.pool.connected(w)
		return
	}
	h.pool.saw(ctx, w, 0, err)
}

// pauseOf returns for how long a worker is not probed again.
func pauseOf(w *worker) time.Duration {
	if w.health.reach().away() {
		return probeTick / 2
	}
	return probeEvery - probeTick/2
}

// restOf returns for how long a worker is not asked again.
func (p *pool) restOf(w *worker) time.Duration {
	var rest time.Duration
	if n := w.refusals.Load(); n > 0 {
		rest = min(probeEvery<<min(n, 8), askedLess)
	}
	if p.isIdle(now()) {
		rest = askedLess
	}
	return rest
}

// isIdle tells whether the pool has had no request for idleAfter.
func (p *pool) isIdle(t time.Time) bool {
	return t.Unix()-max(p.used.Load(), p.live.Load()) > int64(idleAfter/time.Second)
}
