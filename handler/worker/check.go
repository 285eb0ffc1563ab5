package worker

import (
	"sync"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Prediction is how much of a prompt the worker's cache model had when it was booked.
type Prediction struct {
	Prompt uint64 // identifies the prompt
	Tokens int64
	Shared float64 // blocks among them that the worker was still computing
	// Knowledge is where Tokens come from.
	Knowledge kvscore.Knowledge
}

// computed returns the tokens without blocks that were still computed. block is the index's block size.
func (of *Prediction) computed(block int) int64 { return of.Tokens - int64(of.Shared*float64(block)) }

// eventsCheck compares what KV events predict with the cached tokens that the engine reports.
type eventsCheck struct {
	mu        sync.Mutex
	missed    map[uint64]bool // prompts whose reports were far below the prediction, in a row
	unmatched int             // requests in a row that the engine had cached although the events showed nothing
	doubted   bool            // the router does not rely on the events

	uncounted atomic.Int32 // see CountedCache
}

// reset forgets all, because the engine or its events are others.
func (c *eventsCheck) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.missed, c.unmatched, c.doubted = nil, 0, false
}

const (
	// substantial is the least prediction, in tokens, that the check of the events compares.
	substantial = 512
	// manyMissed is how many prompts in a row must be far less cached than predicted. Evictions
	// while requests wait in the engine explain some.
	manyMissed = 12
	// manyUnmatched is how many requests in a row must be cached without an event that says so.
	manyUnmatched = 20
	// uncountedAnswers is how many answers in a row must lack a count of cached tokens for a
	// warning.
	uncountedAnswers = 20
)

// reports are the kinds of answers that report what was cached.
type reports struct {
	mu    sync.Mutex
	kinds map[ReportKind]bool
}

// ReportKind is a kind of answer. Which kinds report what was cached depends on the
// engine's version.
type ReportKind struct {
	API    string
	Stream bool
}

// reset forgets all: the engine may have another version now.
func (r *reports) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kinds = nil
}

// reported records whether an answer reports what was cached, and returns whether any
// answer of its kind did.
func (r *reports) reported(kind ReportKind, does bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kinds == nil {
		r.kinds = make(map[ReportKind]bool)
	}
	if does {
		r.kinds[kind] = true
	}
	return does || r.kinds[kind]
}
