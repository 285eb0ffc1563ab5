package worker

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// leastBlocks returns two of the larger of the index's and the engine's blocks, in tokens.
func (w *Worker) leastBlocks(block int) int64 {
	return 2 * int64(max(block, w.Engine().Info.BlockSize))
}

// Verify compares a prediction with what the engine reports, in tokens. It ceases to rely on the worker's
// KV events if the reports contradict them: they may be those of another engine. The scheduler itself
// judges its approximate cache models. block is the index's block size.
func (w *Worker) Verify(of *Prediction, reported int64, block int) {
	if off := max(of.Tokens-reported, reported-of.Tokens); of.Tokens > 0 || reported > 0 {
		w.Past.Mispredicted(off)
	}
	if of.Knowledge == kvscore.Approximate {
		return
	}
	c, predicted := &w.check, of.computed(block)
	c.mu.Lock()
	switch {
	case of.Tokens > 0 && reported > 0:
		c.unmatched = 0
	case of.Tokens == 0 && reported >= w.leastBlocks(block):
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
	doubt := (c.unmatched >= manyUnmatched || len(c.missed) >= manyMissed) && !c.doubted.Swap(true)
	c.mu.Unlock()
	if doubt {
		w.subscription.doubt(true)
	}
}

// DoubtsEvents returns whether the router does not rely on the worker's KV events.
func (w *Worker) DoubtsEvents() bool { return w.check.doubted.Load() }

// CountedCache records whether an answer that generates reports the cached tokens of its
// prompt. Engines may omit a count of 0. An omission therefore says something only if the
// worker was predicted to cache at least two of the engine's blocks.
func (w *Worker) CountedCache(of *Prediction, counted bool, block int) {
	missing := &w.check.uncounted
	switch n := missing.Load(); {
	case counted && n > 0:
		missing.Store(0)
	case !counted && n < uncountedAnswers && of.computed(block) >= w.leastBlocks(block):
		missing.Add(1)
	}
}

// OmitsCounts returns whether the worker's answers lack counts of cached tokens.
func (w *Worker) OmitsCounts() bool { return w.check.uncounted.Load() >= uncountedAnswers }

// CachedTokens returns how many prompt tokens the engine had cached, -1 if unknown. Some
// engines omit a count of 0, so an omission means 0 once another answer of the kind had a count.
func (w *Worker) CachedTokens(kind ReportKind, reported int64) int64 {
	if !w.Engine().Info.OmitsZeroCached() {
		return reported
	}
	_, known := w.reports.Load(kind)
	switch {
	case !known && reported < 0:
		return -1
	case !known:
		w.reports.Store(kind, true)
	}
	return max(reported, 0)
}

// BlockSize returns the tokens in one of the engine's blocks, as it reports or as its KV events
// show; 0 is unknown.
func (w *Worker) BlockSize() int {
	if size := w.Engine().Info.BlockSize; size > 0 {
		return size
	}
	following := w.Following()
	for i := range following {
		if size := following[i].BlockTokens; size > 0 {
			return size
		}
	}
	return 0
}

// Restarted forgets what was found out of the answers and events of the worker's engine, for it has
// restarted, and asks for its events again.
func (w *Worker) Restarted() {
	w.reports.Clear() // the engine may have another version now
	w.check.reset()
	w.subscription.again()
	w.restarted.Store(ticks(time.Now()))
}

// RestartedSince returns whether the router has learned since a time that the worker's engine restarted.
func (w *Worker) RestartedSince(t time.Time) bool { return w.restarted.Load() > ticks(t) }

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

// ReportKind is a kind of answer. Which kinds report what was cached depends on the
// engine's version.
type ReportKind struct {
	API    string
	Stream bool
}
