package sim

import (
	"fmt"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// follow feeds what happens in the engines' caches to the scheduler, as their KV events do
// without delay.
func (r *replay) follow() {
	for i, e := range r.engines {
		f := r.routers[0].scheduler.Caches().Feed(r.targets[i])
		f.Describe(cache.FeedInfo{Knowledge: kvscore.Exact, BlockTokens: r.Trace.BlockTokens, HitsInFlight: true})
		e.Cache().Listen(&informant{f, r})
	}
}

// informant passes on what a cache says. A block's hash is its name and its content.
type informant struct {
	feed *cache.Feed
	of   *replay
}

// Stored implements engine.Listener.
func (in *informant) Stored(parent uint64, hasParent bool, blocks []uint64) {
	n, why := in.feed.Stored(&cache.Stored{Root: in.of.Seed, Parent: parent, HasParent: hasParent, Names: blocks, Blocks: blocks})
	if in.of.err == nil && n != len(blocks) {
		in.of.err = fmt.Errorf("the index refuses what an engine stores: outcome %d", why)
	}
}

// Removed implements engine.Listener.
func (in *informant) Removed(block uint64) { in.feed.Removed(cache.Device, []uint64{block}) }
