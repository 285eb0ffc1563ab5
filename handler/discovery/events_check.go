package discovery

import (
	"sync"
	"time"

	"go.uber.org/zap"
)

// eventsCheck compares what KV events predict with the cached tokens that the engine reports.
type eventsCheck struct {
	mu        sync.Mutex
	missed    map[uint64]bool // prompts whose reports were far below the prediction, in a row
	resyncs   int             // in a row, without an hour in between
	resynced  time.Time
	unmatched int  // requests in a row that the engine had cached although the events showed nothing
	doubted   bool // the router does not rely on the events
}

// reset forgets all, because the engine is another one.
func (c *eventsCheck) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.missed, c.resyncs, c.resynced, c.unmatched, c.doubted = nil, 0, time.Time{}, 0, false
}

const (
	// manyResyncs is how many resyncs must not have helped for the router to cease to rely on a
	// worker's events. Those that are further apart than forgiven do not add up.
	manyResyncs, forgiven = 3, time.Hour
	// manyUnmatched is how many requests in a row must be cached without an event that says so.
	manyUnmatched = 20
)

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
	doubt := !c.doubted && (c.unmatched >= manyUnmatched || lost && c.resyncs > manyResyncs)
	c.doubted = c.doubted || doubt
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

// isDoubted returns whether the router does not rely on the worker's events.
func (c *eventsCheck) isDoubted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.doubted
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
