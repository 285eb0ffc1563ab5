package sim

import (
	"fmt"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// follow feeds what happens in the engines' caches to the routers, as their KV events do. Without
// Learned, they take no time.
func (r *replay) follow() {
	for i, e := range r.engines {
		in := &informant{of: r}
		for _, o := range r.routers {
			f := o.scheduler.Caches().Feed(r.targets[i])
			f.Describe(cache.FeedInfo{Knowledge: kvscore.Exact, BlockTokens: r.Trace.BlockTokens, HitsInFlight: true})
			in.feeds = append(in.feeds, f)
		}
		e.Cache().Listen(in)
	}
}

// informant passes on what a cache says. A block's hash is its name and its content.
type informant struct {
	feeds []*cache.Feed
	of    *replay
}

// Stored implements engine.Listener.
func (in *informant) Stored(job int, parent uint64, hasParent bool, blocks []uint64) {
	in.pass(func(f *cache.Feed) {
		session := in.of.requests[job].session
		s := &cache.Stored{Root: in.of.Seed, Parent: parent, HasParent: hasParent, Names: blocks, Blocks: blocks, Session: []byte(session)}
		n, why := f.Stored(s)
		if in.of.err == nil && n != len(blocks) {
			in.of.err = fmt.Errorf("the index refuses what an engine stores: outcome %d", why)
		}
	})
}

// Removed implements engine.Listener.
func (in *informant) Removed(block uint64) {
	in.pass(func(f *cache.Feed) { f.Removed(cache.Device, []uint64{block}) })
}

// pass tells all routers.
func (in *informant) pass(tell func(*cache.Feed)) {
	all := func() {
		for _, f := range in.feeds {
			tell(f)
		}
	}
	if r := in.of; r.Learned {
		r.informed++
		r.events.push(event{at: r.now + eventsLate, n: r.informed, do: all})
	} else {
		all()
	}
}
