package discovery

import (
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore/events"
	"go.uber.org/zap"
)

// Apply replaces a pool's settings, and returns whether they changed.
func Apply(p *pool.Pool, s *pool.Settings) (changed bool) {
	changed = p.Apply(s)
	for _, w := range p.All() {
		follow(p, w)
	}
	return changed
}

// follow begins, changes or ends the subscription to a worker's KV events, as its settings and
// what its engine reports demand.
func follow(p *pool.Pool, w *worker.Worker) {
	set, e := p.Settings.Load().Worker(w.Dial), w.Engine()
	from, why := publishers(set.KVEvents, hostOf(w.Dial), e.Info.KVEvents, w.Ranks())
	run := w.Follow(from, why, events.Engine{
		BlockTokens: e.Info.BlockSize,
		Adapters:    e.NamesAll(), Salts: e.NamesAll(), HitsInFlight: e.HitsInFlight(),
	}, &worker.Follower{
		Caches: p.Scheduler.Caches(), Seed: p.Hashing().Seed, Life: p.Life(),
		Logger: p.Logger().With(zap.String("upstream", w.Dial)),
	})
	if run != nil {
		p.Go(run)
	}
}
