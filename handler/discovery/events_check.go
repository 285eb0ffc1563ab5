package discovery

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/events"
	"go.uber.org/zap"
)

// eventsCheck compares what KV events predict with the cached tokens that the engine reports.
type eventsCheck struct {
	mu        sync.Mutex
	missed    map[uint64]bool // prompts whose reports were far below the prediction, in a row
	resyncs   int             // in a row, without an hour in between
	resynced  time.Time
	unmatched int       // requests in a row that the engine had cached although the events showed nothing
	doubted   time.Time // when the router ceased to rely on the events; zero: it relies on them
}

// reset forgets all, because the engine is another one.
func (c *eventsCheck) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.missed, c.resyncs, c.resynced, c.unmatched, c.doubted = nil, 0, time.Time{}, 0, time.Time{}
}

// manyResyncs is how many resyncs must not have helped for the router to cease to rely on a
// worker's events.
const manyResyncs = 3

// verifyEvents acts on reports that contradict a worker's KV events. If reports are far below the
// prediction, the engine has lost its cache and not said so yet. Or its events are those of
// another engine.
func (x *Watch) verifyEvents(of *Prediction, reported int64) {
	w, c, now := x.worker, &x.eventsCheck, time.Now()
	block := int64(x.pool.Settings.Load().BlockSize)
	c.mu.Lock()
	switch {
	case of.Tokens > 0 && reported > 0:
		c.unmatched = 0
	case of.Tokens == 0 && reported >= 2*max(block, int64(w.Engine().Info.BlockSize)):
		c.unmatched++
	}
	lost := c.isLost(now, of, reported, block)
	doubt := c.doubted.IsZero() && (c.unmatched >= manyUnmatched || lost && c.resyncs > manyResyncs)
	if doubt {
		c.doubted = now
	}
	c.mu.Unlock()
	switch {
	case doubt:
		x.events.doubt(true)
	case lost:
		eventResyncs.WithLabelValues(x.pool.Name, w.Dial).Inc()
		x.pool.Logger().Warn("worker reports far fewer cached tokens than its KV events say, and the router asks for them anew",
			zap.String("upstream", w.Dial), zap.Int64("predicted", of.Tokens), zap.Int64("reported", reported))
		x.events.resync()
	}
}

// trustEventsAgain has the router rely again on events that it has doubted for an hour.
func (x *Watch) trustEventsAgain(t time.Time) {
	c := &x.eventsCheck
	c.mu.Lock()
	over := !c.doubted.IsZero() && t.Sub(c.doubted) > forgiven
	c.mu.Unlock()
	if over {
		x.resetEvents()
	}
}

// resetEvents forgets what was found out about the worker's events, and asks for them anew.
func (x *Watch) resetEvents() {
	x.eventsCheck.reset()
	x.events.doubt(false)
	x.events.resync()
}

// isLost records a report and returns whether it is time for a resync: several prompts in a row
// were far less cached than predicted. An eviction while a request waits in the engine explains
// one of them. The lock is held.
func (c *eventsCheck) isLost(now time.Time, of *Prediction, reported, block int64) bool {
	predicted := of.Tokens - int64(of.Shared*float64(block)) // blocks that were still computed
	if predicted < substantial || of.Begun.Before(c.resynced) {
		return false
	}
	if reported*2 >= predicted {
		c.missed = nil
		return false
	}
	if c.missed == nil {
		c.missed = make(map[uint64]bool)
	}
	c.missed[of.Prompt] = true
	if len(c.missed) < fewPrompts {
		return false
	}
	if now.Sub(c.resynced) > forgiven {
		c.resyncs = 0
	}
	c.missed, c.resynced = nil, now
	c.resyncs++
	return true
}

// manyUnmatched is how many requests in a row must be cached without an event that says so.
const manyUnmatched = 20

// isDoubted returns whether the router does not rely on the worker's events.
func (c *eventsCheck) isDoubted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.doubted.IsZero()
}

// blockSize returns the tokens in one of the engine's blocks, as it reports or as its KV events
// show; 0 is unknown.
func (x *Watch) blockSize() int {
	if size := x.worker.Engine().Info.BlockSize; size > 0 {
		return size
	}
	following := x.Following()
	for i := range following {
		if size := following[i].BlockTokens; size > 0 {
			return size
		}
	}
	return 0
}

// eventContradictions adds what a worker's KV events contradict: settings, or what its engine
// reports.
func (x *Watch) eventContradictions(s *pool.Settings, list map[string]string) {
	set, info := s.Worker(x.worker.Dial), &x.worker.Engine().Info
	capacity := cmp.Or(set.KVTokens, info.KVTokens)
	following := x.Following()
	for i := range following {
		f := &following[i]
		held := f.Held[events.Device] * int64(f.BlockTokens)
		switch {
		case f.OtherRank > 0:
			list["dp_size"] = fmt.Sprintf("dp_size: %d, but KV events come from ranks above", len(following))
		case f.BlockTokens > 0 && !s.BlockSizeUnset && s.BlockSize%f.BlockTokens != 0:
			list["block_size"] = fmt.Sprintf("index block_size: configured %d, the KV events have %d", s.BlockSize, f.BlockTokens)
		case capacity > 0 && f.Knowledge == kvscore.Exact && held > capacity+capacity/20:
			list["kv_tokens"] = fmt.Sprintf("kv_tokens: %d, but by its KV events the engine holds %d", capacity, held)
		}
	}
}
