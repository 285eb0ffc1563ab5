// Package discovery asks workers what they are, what they serve, hold and bear. It judges
// whether that is true, and reports it to the pool. It chooses no worker.
package discovery

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const (
	// probeTick is how often a worker that refuses connections is probed.
	probeTick = time.Second
	// probeTimeout is how long a worker may take to answer a probe.
	probeTimeout = 2 * time.Second
	// firstWait is how long after the start requests may wait for the first probes, and for the
	// journal.
	firstWait = 500 * time.Millisecond
	// soonest is the least time between two questions that clients' requests cause.
	soonest = 500 * time.Millisecond
)

// Prober probes the workers of a configuration, from when that serves until it ends.
type Prober struct {
	pool   *pool.Pool
	proxy  *reverseproxy.Handler // whose upstreams it probes
	static map[string]bool       // the dial addresses of these, if they are not dynamic
	client *upstream.Client
	logger *zap.Logger
	ctx    context.Context // ends with the configuration

	id     uint64 // random; a dynamic source's workers have it
	start  sync.Once
	wanted chan struct{} // a worker is to be probed at once
	first  chan struct{} // closed after the first probes and the journal, or after firstWait
}

// New returns the prober of a configuration, which ends with ctx.
func New(
	ctx context.Context, p *pool.Pool, proxy *reverseproxy.Handler, client *upstream.Client, logger *zap.Logger,
) *Prober {
	static := make(map[string]bool)
	for _, up := range proxy.Upstreams {
		static[up.Dial] = true
	}
	return &Prober{
		pool: p, proxy: proxy, static: static, client: client, logger: logger, ctx: ctx,
		id:     rand.Uint64(), //nolint:gosec // tells probers apart
		wanted: make(chan struct{}, 1), first: make(chan struct{}),
	}
}

// Start begins to probe the workers, until the configuration ends. Only the first call
// counts.
func (p *Prober) Start() { p.start.Do(p.run) }

func (p *Prober) run() {
	ctx := p.ctx
	if ctx.Err() != nil { // the last requests of a configuration that has ended
		close(p.first)
		return
	}
	context.AfterFunc(ctx, p.pool.Members.Join(p))
	go func() {
		for _, w := range p.workers() {
			w.AskSoon() // the configuration may reach it in another way
		}
		p.probeDue(ctx)
		first, cancel := context.WithTimeout(ctx, firstWait)
		worker.AwaitProbes(first, firstWait, p.workers())
		p.pool.AwaitJournal(first)
		cancel()
		close(p.first)
		tick := time.Tick(probeTick)
		for {
			select {
			case <-ctx.Done():
				return
			case t := <-tick:
				p.askLoads(ctx, t)
				for _, w := range p.workers() {
					review(p.pool, w, t)
				}
			case <-p.wanted:
			}
			p.probeDue(ctx)
		}
	}()
}

// Await waits for the first probes right after the start.
func (p *Prober) Await(ctx context.Context) {
	select {
	case <-p.first:
	case <-ctx.Done():
	}
}

// Reaches returns whether a worker is one that this handler probes: one of its upstreams, or
// of those that its dynamic source returned lately. Other workers of the pool may be reached
// in another way, or have an address that a client chose. The router asks a backup nothing.
func (p *Prober) Reaches(w *worker.Worker) bool {
	if w.IsBackup() || !p.client.May(w.Dial) {
		return false
	}
	if p.proxy.DynamicUpstreams == nil {
		return p.static[w.Dial]
	}
	return w.IsOfferedBy(p.id) && p.pool.WasOffered(w, pool.WorkerGrace)
}

// Call implements pool.Member.
func (p *Prober) Call(ctx context.Context, w *worker.Worker, path string, body []byte) (status int, answer []byte, err error) {
	return p.client.Fetch(ctx, w.Dial, http.MethodPost, path, body, nil, engine.MaxBody)
}

// workers returns the workers that this handler probes. The address of one that its source no longer
// returns may soon be another program's.
func (p *Prober) workers() []*worker.Worker {
	set := p.pool.Settings.Load()
	return slices.DeleteFunc(p.pool.All(), func(w *worker.Worker) bool { return !p.Reaches(w) || !p.pool.IsUpstream(set, w) })
}

// TakesTokenData returns whether the engines of all workers accept the ids of
// nvext.token_data in an API. If one does not, the body's prompt counts for all.
func (p *Prober) TakesTokenData(api string) bool {
	workers := p.workers()
	if len(workers) == 0 {
		return new(engine.Engine).TakesTokenData(api)
	}
	return !slices.ContainsFunc(workers, func(w *worker.Worker) bool {
		return !w.Engine().TakesTokenData(api)
	})
}

// Discovered records that a dynamic source gave a worker to this handler. A new worker is
// probed at once.
func (p *Prober) Discovered(w *worker.Worker) {
	if p.proxy.DynamicUpstreams == nil || w.OfferedBy(p.id) {
		return
	}
	if !w.WasProbed() {
		p.soon()
	}
}

// AskAgain asks a worker soon which models it serves, because its list is wrong.
func (p *Prober) AskAgain(w *worker.Worker) {
	w.AskAgain() // it may sleep now
	if w.AskModelsAgain(time.Now(), soonest) {
		p.soon()
	}
}

func (p *Prober) soon() {
	select {
	case p.wanted <- struct{}{}:
	default: // it is about to be done
	}
}

func (p *Prober) probeDue(ctx context.Context) {
	for _, w := range p.workers() {
		t := time.Now()
		due, ask := w.BeginProbe(t, pauseOf(w), modelsInterval(p.pool, w, t))
		if !due {
			continue
		}
		go func() {
			detected := p.probe(ctx, w, ask)
			w.EndProbe()
			if detected {
				agreeOnBlocks(p.pool)
			}
			w.MarkProbed()
		}()
	}
}

// probe checks whether a worker can be reached. If ask is set, it asks what the worker
// serves and, if that is due, what it is. It returns whether it asked the latter.
func (p *Prober) probe(whole context.Context, w *worker.Worker, ask bool) (detected bool) {
	defer follow(p.pool, w)
	ctx, cancel := context.WithTimeout(whole, probeTimeout)
	defer cancel()
	if ask {
		if !w.HasConfiguredModels() ||
			// the operator lists its models: it is asked only to end an absence
			w.Health.Reach() == worker.Unresponsive && w.Settings().Engine != engine.Other {
			return p.askModels(ctx, w) && p.detect(whole, w)
		}
		if p.detect(whole, w) {
			return true
		}
	}
	tried, err := p.client.Connect(ctx, w.Dial)
	switch {
	case !tried:
	case err == nil:
		w.Connected(time.Now())
	default:
		p.pool.RecordOwnRequest(ctx, w, 0, err)
	}
	return false
}

func modelsInterval(p *pool.Pool, w *worker.Worker, t time.Time) time.Duration {
	if p.IsIdle(t) || w.RefusesModels() {
		return worker.AskedLess
	}
	return 0
}

func pauseOf(w *worker.Worker) time.Duration {
	if w.Health.Reach().Away() {
		return probeTick / 2
	}
	return worker.ProbeEvery - probeTick/2
}

// saw tells the pool how a question to a worker ended, and returns whether it was
// answered. An address that cannot be asked says nothing of its worker.
func (p *Prober) saw(ctx context.Context, w *worker.Worker, status int, err error) bool {
	return !errors.Is(err, upstream.ErrNoDial) && p.pool.RecordOwnRequest(ctx, w, status, err)
}
