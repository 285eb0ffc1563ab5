package handler

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/caddyserver/caddy/v2"
)

const (
	// lookEvery is how often the workers are asked for their models, or at least
	// connected to.
	lookEvery = 4 * time.Second
	// lookTick is how often a worker is tried to which no connection can be made.
	lookTick = time.Second
	// liveCheck is how often a provisioned configuration looks whether it serves.
	liveCheck = 20 * time.Millisecond
	// lookTimeout is how long a worker may take to tell.
	lookTimeout = 2 * time.Second
	// firstWait is how long the first requests wait for what the workers tell.
	firstWait = time.Second
	// idleAfter is how long a pool must have no request to be idle: its workers
	// may sleep, or cost money for each question, and are asked as rarely as
	// those that tell nothing. They are connected to all the same.
	idleAfter = 10 * time.Minute
)

// scout asks the workers which models they serve, and now and then what they
// are, from when the handler's configuration serves until its end.
type scout struct {
	news  chan struct{} // there is something to be asked at once
	first chan struct{} // closed after the first look; made in Provision
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

// startScout begins to ask. A handler that was cleaned up meanwhile, whose last
// requests still run, asks no more.
func (h *Handler) startScout() {
	ctx := h.ctx
	if ctx == nil {
		return // never provisioned, as in tests
	}
	go func() {
		h.look(ctx, true).Wait()
		h.pool.agreeOnBlocks()
		close(h.scout.first)
		ticker := time.NewTicker(lookTick)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			case <-h.scout.news:
			}
			h.look(ctx, false)
		}
	}()
}

// own returns the workers that are this handler's to ask: its upstreams, and of
// a dynamic source those that it gave lately. Others of the pool may be reached
// in another way, are perhaps no upstreams any more, or have an address that a
// client chose.
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

// met takes in that a dynamic source gave a worker to this handler. A new one
// need not wait for the next look.
func (h *Handler) met(w *worker) {
	if h.ReverseProxy.DynamicUpstreams == nil || w.by.Load() == h {
		return
	}
	w.by.Store(h)
	if !w.looked.Load() {
		h.scout.lookSoon()
	}
}

// lookSoon lets the workers be asked without waiting for the next time.
func (s *scout) lookSoon() {
	select {
	case s.news <- struct{}{}:
	default: // it is about to be done
	}
}

// awaitFirstLook waits until it is known which models the workers serve, at
// most for firstWait. It returns at once where they have been asked before, and
// where there is nothing to know.
func (h *Handler) awaitFirstLook(ctx context.Context) {
	h.awaitLook(ctx, 2, func(w *worker) bool {
		return w.configured.Load() == nil && w.models.Load() == nil && !w.looked.Load()
	})
}

// awaitTold waits in the same way until the workers were asked what they are: what
// a client says, and may not, must not pass because nobody has asked yet whether
// its engine heeds it.
func (h *Handler) awaitTold(ctx context.Context) {
	h.awaitLook(ctx, 1, func(w *worker) bool {
		return !w.looked.Load() && h.pool.settings.Load().worker(w.dial).Engine != engine.Other
	})
}

// awaitLook waits for the first look if it is under way, there are so many
// workers at least, and something is open of one of them.
func (h *Handler) awaitLook(ctx context.Context, least int, open func(*worker) bool) {
	if h.hasLooked() {
		return
	}
	own := h.own()
	if len(own) < least || !slices.ContainsFunc(own, open) {
		return
	}
	timer := time.NewTimer(firstWait)
	defer timer.Stop()
	select {
	case <-h.scout.first:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// hasLooked tells whether the first look is over, or there is none.
func (h *Handler) hasLooked() bool {
	if h.ctx == nil {
		return true
	}
	select {
	case <-h.scout.first:
		return true
	default:
		return false
	}
}

// look probes the workers, all at the same time, of which it is time to. It does
// not wait for them: who wants to, can.
func (h *Handler) look(ctx context.Context, first bool) *sync.WaitGroup {
	var under sync.WaitGroup
	for _, w := range h.own() {
		if first {
			h.lookFirst(ctx, w, &under)
			continue
		}
		t, last := now().UnixNano(), w.probed.Load()
		if w.probing.Load() || t-last < int64(pauseOf(w)) || !w.probed.CompareAndSwap(last, t) {
			continue // another handler of the pool looks at it, or has just done so
		}
		w.probing.Store(true)
		ask := t-w.asked.Load() >= int64(h.pool.restOf(w))
		under.Go(func() {
			told := h.probe(ctx, w, ask)
			w.probing.Store(false)
			if told {
				h.pool.agreeOnBlocks()
			}
		})
	}
	return &under
}

// probe looks whether a worker can be reached and, if ask is set, asks what it
// serves and, if it is time to, what it is: told is whether it did that.
func (h *Handler) probe(whole context.Context, w *worker, ask bool) (told bool) {
	defer w.looked.Store(true)
	ctx, cancel := context.WithTimeout(whole, lookTimeout)
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

// asksModels tells whether a worker is asked which models it serves. Where the
// operator says it, that ends an absence.
func (h *Handler) asksModels(w *worker) bool {
	return w.configured.Load() == nil ||
		w.health.reach() == unresponsive && h.pool.settings.Load().worker(w.dial).Engine != engine.Other
}

// connect makes a connection to a worker that is not asked anything now.
func (h *Handler) connect(ctx context.Context, w *worker) {
	tried, err := h.client.Connect(ctx, w.dial)
	switch {
	case !tried:
	case err == nil:
		h.pool.connected(w)
	default:
		h.pool.saw(ctx, w, err)
	}
}

// pauseOf returns for how long a worker is left alone after it was looked at.
func pauseOf(w *worker) time.Duration {
	if w.health.reach().away() {
		return lookTick / 2
	}
	return lookEvery - lookTick/2
}

// restOf returns for how long a worker is not asked again.
func (p *pool) restOf(w *worker) time.Duration {
	var rest time.Duration
	if n := w.refusals.Load(); n > 0 {
		rest = min(lookEvery<<min(n, 8), askedLess)
	}
	if p.isIdle(now()) {
		rest = askedLess
	}
	return rest
}

// isIdle tells whether nothing was asked of the pool for a while.
func (p *pool) isIdle(t time.Time) bool {
	return t.Unix()-max(p.used.Load(), p.live.Load()) > int64(idleAfter/time.Second)
}
