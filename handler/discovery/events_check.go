package discovery

import "sync"

// eventsCheck compares what KV events predict with the cached tokens that the engine reports.
type eventsCheck struct {
	mu        sync.Mutex
	missed    map[uint64]bool // prompts whose reports were far below the prediction, in a row
	unmatched int             // requests in a row that the engine had cached although the events showed nothing
	doubted   bool            // the router does not rely on the events
}

// reset forgets all, because the engine or its events are others.
func (c *eventsCheck) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.missed, c.unmatched, c.doubted = nil, 0, false
}

const (
	// manyMissed is how many prompts in a row must be far less cached than predicted. Evictions
	// while requests wait in the engine explain some.
	manyMissed = 12
	// manyUnmatched is how many requests in a row must be cached without an event that says so.
	manyUnmatched = 20
)

// verifyEvents ceases to rely on a worker's KV events if the engine's reports contradict them. The
// events may be those of another engine.
func (x *Watch) verifyEvents(of *Prediction, reported int64) {
	c, block := &x.eventsCheck, int64(x.pool.Settings.Load().BlockSize)
	predicted := of.Tokens - int64(of.Shared*float64(block)) // without blocks that were still computed
	c.mu.Lock()
	switch {
	case of.Tokens > 0 && reported > 0:
		c.unmatched = 0
	case of.Tokens == 0 && reported >= 2*max(block, int64(x.worker.Engine().Info.BlockSize)):
		c.unmatched++
	}
	switch {
	case predicted < substantial:
	case reported*2 >= predicted:
		c.missed = nil
	default:
		if c.missed == nil {
			c.missed = make(map[uint64]bool)
		}
		c.missed[of.Prompt] = true
	}
	doubt := !c.doubted && (c.unmatched >= manyUnmatched || len(c.missed) >= manyMissed)
	c.doubted = c.doubted || doubt
	c.mu.Unlock()
	if doubt {
		x.events.doubt(true)
	}
}

// resetEvents forgets what was found out about the worker's events, and asks for them anew.
func (x *Watch) resetEvents() {
	x.eventsCheck.reset()
	x.events.doubt(false)
	x.events.resync()
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
