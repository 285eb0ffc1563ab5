package discovery

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Prediction is how much of a prompt a worker's cache model had when the attempt was booked.
type Prediction struct {
	Begun  time.Time // of the attempt
	Prompt uint64    // identifies the prompt
	Tokens int64
	Shared float64 // blocks among them that the worker was still computing
	// Knowledge is where Tokens come from.
	Knowledge kvscore.Knowledge
}

// Verify compares a prediction with what the engine reports, in tokens. It acts if the
// worker's cache model must be wrong as a whole.
func (x *Watch) Verify(of *Prediction, reported int64) {
	predicted := of.Tokens
	if off := max(predicted-reported, reported-predicted); predicted > 0 || reported > 0 {
		predictionErrors.WithLabelValues(x.pool.Name, x.worker.Dial).Observe(float64(off))
	}
	if of.Knowledge != kvscore.Approximate {
		x.verifyEvents(of, reported)
		return
	}
	if reported*4 < predicted*3 { // some engines reuse no block that they still compute
		predicted -= int64(of.Shared * float64(x.pool.Settings.Load().BlockSize))
	}
	if x.cacheCheck.compare(time.Now(), of.Begun, of.Prompt, predicted, reported) {
		x.pool.CacheIsWrong(x.worker)
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

const (
	// substantial is the least prediction, in tokens, that the check compares.
	substantial = 512
	// fewConfirmations is how many predictions must be right after the cache model was
	// cleared, before wrong ones count. If none is ever right, clearing does not help.
	fewConfirmations = 3
	// fewMisses is how many predictions in a row must be wrong to clear the cache model.
	fewMisses = 5
	// fewPrompts is the least number of prompts that must show a fault.
	fewPrompts = 3
	// clearPause is the least time since the last clearing. Predictions that stay wrong have
	// another cause, such as a cache that evicts a lot.
	clearPause = 10 * time.Minute
)

// cacheCheck compares predicted with reported cached tokens. After an unseen restart, or a
// flush of its cache, an engine reports far fewer for all prompts.
type cacheCheck struct {
	mu        sync.Mutex
	confirmed int
	misses    int                 // in a row
	prompts   map[uint64]bool     // of the misses
	cleared   time.Time           // when the cache model was last cleared, for any reason
	reports   map[ReportKind]bool // the kinds that report what was cached
}

// ReportKind is a kind of answer. Which kinds report what was cached depends on the
// engine's version.
type ReportKind struct {
	API    string
	Stream bool
}

// reset records that the cache model was cleared.
func (d *cacheCheck) reset(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.confirmed, d.misses, d.prompts, d.cleared = 0, 0, nil, t
	d.reports = nil // the engine may have another version now
}

// restored has wrong predictions count from now on: the cache model of an earlier run may be wrong.
func (d *cacheCheck) restored() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cleared.IsZero() {
		d.confirmed = fewConfirmations
	}
}

// reported records whether an answer reports what was cached, and returns whether any
// answer of its kind did.
func (d *cacheCheck) reported(kind ReportKind, does bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reports == nil {
		d.reports = make(map[ReportKind]bool)
	}
	if does {
		d.reports[kind] = true
	}
	return does || d.reports[kind]
}

// compare records a prediction and what the worker reports, in tokens. It returns whether
// the cache model must be wrong as a whole.
func (d *cacheCheck) compare(now, begun time.Time, prompt uint64, predicted, reported int64) bool {
	if predicted < substantial {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case begun.Before(d.cleared):
		return false
	case reported*4 >= predicted*3:
		d.confirmed++
		d.misses, d.prompts = 0, nil
		return false
	case reported*2 >= predicted || predicted-reported < substantial || d.confirmed < fewConfirmations:
		return false
	}
	d.misses++
	if d.prompts == nil {
		d.prompts = make(map[uint64]bool)
	}
	d.prompts[prompt] = true
	return d.misses >= fewMisses && len(d.prompts) >= fewPrompts && now.Sub(d.cleared) >= clearPause
}

// CachedTokens returns how many prompt tokens the engine had cached, -1 if unknown. Some
// engines omit a count of 0, so an omission means 0 once another answer of the kind had a count.
func (x *Watch) CachedTokens(kind ReportKind, reported int64) int64 {
	if !x.worker.Engine().Info.OmitsZeroCached() {
		return reported
	}
	if !x.cacheCheck.reported(kind, reported >= 0) {
		return -1
	}
	return max(reported, 0)
}
