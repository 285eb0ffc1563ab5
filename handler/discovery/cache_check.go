package discovery

import (
	"sync"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Prediction is how much of a prompt a worker's cache model had when it was booked.
type Prediction struct {
	Prompt uint64 // identifies the prompt
	Tokens int64
	Shared float64 // blocks among them that the worker was still computing
	// Knowledge is where Tokens come from.
	Knowledge kvscore.Knowledge
}

// Verify compares a prediction with what the engine reports, in tokens. It acts if the
// worker's KV events must be wrong. The scheduler itself judges its approximate cache models.
func (x *Watch) Verify(of *Prediction, reported int64) {
	predicted := of.Tokens
	if off := max(predicted-reported, reported-predicted); predicted > 0 || reported > 0 {
		predictionErrors.WithLabelValues(x.pool.Name, x.worker.Dial).Observe(float64(off))
	}
	if of.Knowledge != kvscore.Approximate {
		x.verifyEvents(of, reported)
	}
}

// hitSums are sums over the prompts that a worker has computed, in tokens.
type hitSums struct {
	Foreseen, Estimated atomic.Int64 // predicted cached and prompt tokens, when booked
	Cached, Prompt      atomic.Int64 // the same, as the engine reported them
}

// Predicted adds a booked prompt.
func (h *hitSums) Predicted(cached, prompt int64) {
	h.Foreseen.Add(cached)
	h.Estimated.Add(prompt)
}

// Reported adds the engine's counts of a prompt.
func (h *hitSums) Reported(cached, prompt int64) {
	h.Cached.Add(cached)
	h.Prompt.Add(prompt)
}

// substantial is the least prediction, in tokens, that the check of the events compares.
const substantial = 512

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

// CachedTokens returns how many prompt tokens the engine had cached, -1 if unknown. Some
// engines omit a count of 0, so an omission means 0 once another answer of the kind had a count.
func (x *Watch) CachedTokens(kind ReportKind, reported int64) int64 {
	if !x.worker.Engine().Info.OmitsZeroCached() {
		return reported
	}
	if !x.reports.reported(kind, reported >= 0) {
		return -1
	}
	return max(reported, 0)
}
