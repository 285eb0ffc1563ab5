package handler

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const (
	// probeTick is how often a worker is probed that refuses connections.
	probeTick = time.Second
	// probeTimeout is how long a worker may take to answer a probe.
	probeTimeout = 2 * time.Second
	// firstWait is how long after the start requests may wait for the first probes.
	firstWait = 500 * time.Millisecond
	// soonest is the least time between two questions that clients' requests cause.
	soonest = 500 * time.Millisecond
)

// prober probes the workers of a configuration, from when that serves until it ends.
type prober struct {
	pool   *pool
	proxy  *reverseproxy.Handler // whose upstreams it probes
	client *upstream.Client
	config *sharedSettings // identifies the configuration
	logger *zap.Logger
	ctx    context.Context // ends with the configuration

	id     uint64        // unique in the pool
	wanted chan struct{} // a worker is to be probed at once
	first  chan struct{} // closed after the first probes, or after firstWait
}

func newProber(ctx context.Context, p *pool, proxy *reverseproxy.Handler, client *upstream.Client, config *sharedSettings, logger *zap.Logger) *prober {
	return &prober{
		pool: p, proxy: proxy, client: client, config: config, logger: logger, ctx: ctx,
		id: p.probers.Add(1), wanted: make(chan struct{}, 1), first: make(chan struct{}),
	}
}

// start begins to probe the workers, until the configuration ends.
func (p *prober) start() {
	ctx := p.ctx
	if ctx.Err() != nil { // the last requests of a configuration that has ended
		close(p.first)
		return
	}
	go func() {
		// After a reload the pool knows its workers, and nobody has to wait.
		known := !slices.ContainsFunc(p.own(), func(w *worker) bool { return !w.wasProbed() })
		if known {
			close(p.first)
		}
		p.firstProbes(ctx)
		if !known {
			close(p.first)
		}
		ticker := time.NewTicker(probeTick)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			case <-p.wanted:
			}
			p.probeDue(ctx)
		}
	}()
}

// firstProbes probes all workers. It returns after firstWait at the latest.
func (p *prober) firstProbes(ctx context.Context) {
	over := make(chan struct{})
	go func() {
		var under sync.WaitGroup
		for _, w := range p.own() {
			if w.probedFor.Swap(p.config) == p.config {
				under.Go(func() { <-w.probed }) // another handler of the pool probes it
				continue
			}
			w.probedAt.Store(time.Now().UnixNano())
			began := w.probing.CompareAndSwap(false, true)
			under.Go(func() {
				p.probe(ctx, w, true)
				if began {
					w.probing.Store(false)
				}
			})
		}
		under.Wait()
		p.pool.agreeOnBlocks()
		close(over)
	}()
	timer := time.NewTimer(firstWait)
	defer timer.Stop()
	select {
	case <-over:
	case <-timer.C:
		p.pool.agreeOnBlocks() // among those that answered in time
	case <-ctx.Done():
	}
}

// await lets a request that comes right after the start wait for the first
// probes. A plan then uses what is known.
func (p *prober) await(ctx context.Context) {
	select {
	case <-p.first:
	case <-ctx.Done():
	}
}

// own returns the workers that this handler probes: its upstreams, and of a
// dynamic source those that it returned lately. Other workers of the pool may be
// reached in another way, or have an address that a client chose.
func (p *prober) own() []*worker {
	if p.proxy.DynamicUpstreams != nil {
		list := p.pool.all()
		return slices.DeleteFunc(list, func(w *worker) bool {
			return w.by.Load() != p.id || p.pool.used.Load()-w.seen.Load() > int64(workerGrace/time.Second)
		})
	}
	list := make([]*worker, 0, len(p.proxy.Upstreams))
	for _, up := range p.proxy.Upstreams {
		if w := p.pool.known(up.Dial); w != nil {
			list = append(list, w)
		}
	}
	return list
}

// takesTokenData returns whether the engines of all workers take the ids of
// nvext.token_data in an API. If one does not, the body's prompt counts for all.
func (p *prober) takesTokenData(api string) bool {
	workers, unknown := p.own(), engine.Engine{}
	if len(workers) == 0 {
		return unknown.TakesTokenData(api)
	}
	return !slices.ContainsFunc(workers, func(w *worker) bool {
		e := p.pool.engineOf(w)
		return !e.TakesTokenData(api)
	})
}

// Met records that a dynamic source gave a worker to this handler. A new worker is
// probed at once.
func (p *prober) Met(w *worker) {
	if p.proxy.DynamicUpstreams == nil || w.by.Load() == p.id {
		return
	}
	w.by.Store(p.id)
	if !w.wasProbed() {
		p.soon()
	}
}

// AskAgain asks a worker soon which models it serves, because its list is wrong.
func (p *prober) AskAgain(w *worker) {
	if time.Now().UnixNano()-w.asked.Load() < int64(soonest) {
		return
	}
	w.asked.Store(0)
	w.probedAt.Store(0)
	p.soon()
}

// soon has the workers that are due probed at once.
func (p *prober) soon() {
	select {
	case p.wanted <- struct{}{}:
	default: // it is about to be done
	}
}

// probeDue starts a probe of each worker that is due.
func (p *prober) probeDue(ctx context.Context) {
	for _, w := range p.own() {
		t, last := time.Now().UnixNano(), w.probedAt.Load()
		if w.probing.Load() || t-last < int64(pauseOf(w)) || !w.probedAt.CompareAndSwap(last, t) {
			continue // another handler of the pool probes it, or has just done so
		}
		w.probing.Store(true)
		ask := t-w.asked.Load() >= int64(p.pool.restOf(w))
		go func() {
			told := p.probe(ctx, w, ask)
			w.probing.Store(false)
			if told {
				p.pool.agreeOnBlocks()
			}
		}()
	}
}

// probe finds out whether a worker can be reached. If ask is set, it asks what the
// worker serves and, if that is due, what it is: told is whether it did the latter.
func (p *prober) probe(whole context.Context, w *worker, ask bool) (told bool) {
	defer w.markProbed()
	ctx, cancel := context.WithTimeout(whole, probeTimeout)
	defer cancel()
	if ask {
		w.asked.Store(time.Now().UnixNano())
		if p.asksModels(w) {
			return p.askModels(ctx, w) && p.detect(whole, w)
		}
		if p.detect(whole, w) {
			return true
		}
	}
	p.connect(ctx, w)
	return false
}

// asksModels tells whether a worker is asked which models it serves. If the
// operator lists them, it is asked only to end an absence.
func (p *prober) asksModels(w *worker) bool {
	return w.configured.Load() == nil ||
		w.health.reach() == unresponsive && p.pool.settings.Load().worker(w.dial).Engine != engine.Other
}

// connect makes a connection to a worker that is not asked anything now.
func (p *prober) connect(ctx context.Context, w *worker) {
	tried, err := p.client.Connect(ctx, w.dial)
	switch {
	case !tried:
	case err == nil:
		p.pool.connected(w)
	default:
		p.pool.saw(ctx, w, 0, err)
	}
}

// pauseOf returns for how long a worker is not probed again.
func pauseOf(w *worker) time.Duration {
	if w.health.reach().away() {
		return probeTick / 2
	}
	return probeEvery - probeTick/2
}
