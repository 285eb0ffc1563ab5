package pool

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Prediction is what a worker was predicted to hold of a prompt at an attempt's booking.
type Prediction struct {
	Begun  time.Time // of the attempt
	Prompt uint64    // identifies the prompt
	Tokens int64
	Shared float64 // blocks of these that were still being computed for other requests
}

// Verify compares a prediction with what the engine reports, in tokens. It clears the
// worker's cache model if that must be wrong as a whole.
func (p *Pool) Verify(w *Worker, of *Prediction, reported int64) {
	predicted := of.Tokens
	if off := max(predicted-reported, reported-predicted); predicted > 0 || reported > 0 { // else there was nothing to predict
		predictionErrors.WithLabelValues(p.Name, w.Dial).Observe(float64(off))
		w.Misses.note(off, off <= int64(cmp.Or(w.Engine.Info().BlockSize, p.Settings.Load().BlockSize)))
	}
	if reported*4 < predicted*3 { // engines differ in whether they find what others still compute
		predicted -= int64(of.Shared * float64(p.Settings.Load().BlockSize))
	}
	if w.cacheCheck.compare(time.Now(), of.Begun, of.Prompt, predicted, reported) {
		p.clear(w, clearedMismatch)
		w.Engine.AskAgain()
	}
}

// keptMisses is how many errors are kept.
const keptMisses = 512

// errorRing keeps the errors of the last predictions, in tokens.
type errorRing struct {
	mu     sync.Mutex
	off    [keptMisses]int32 // a ring
	within [keptMisses]bool  // one of the engine's blocks
	n      int
}

func (m *errorRing) note(off int64, within bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := m.n % keptMisses
	m.off[i], m.within[i] = int32(min(off, math.MaxInt32)), within
	m.n++
}

// MissesView summarizes how far the predicted cached tokens of the last answers
// were from those that the engine reported.
type MissesView struct {
	Answers     int     `json:"answers"`
	P50         int32   `json:"p50_tokens"`
	P90         int32   `json:"p90_tokens"`
	P99         int32   `json:"p99_tokens"`
	WithinBlock float64 `json:"share_within_one_block"`
}

// View returns nil while there were no answers to compare.
func (m *errorRing) View() *MissesView {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := min(m.n, keptMisses)
	if n == 0 {
		return nil
	}
	off, within := slices.Sorted(slices.Values(m.off[:n])), 0
	for _, is := range m.within[:n] {
		if is {
			within++
		}
	}
	at := func(q float64) int32 { return off[min(int(q*float64(n)), n-1)] }
	return &MissesView{n, at(0.5), at(0.9), at(0.99), float64(within) / float64(n)}
}

// hitSums are sums over the prompts that a worker has computed, in tokens: predicted when
// the attempt was booked, and as the engine reported them.
type hitSums struct {
	Foreseen, Estimated atomic.Int64
	Cached, Prompt      atomic.Int64
}

func (h *hitSums) Predicted(cached, prompt int64) {
	h.Foreseen.Add(cached)
	h.Estimated.Add(prompt)
}

func (h *hitSums) Reported(cached, prompt int64) {
	h.Cached.Add(cached)
	h.Prompt.Add(prompt)
}

const (
	// substantial is the least prediction, in tokens, that is compared.
	substantial = 512
	// confirmations is how many predictions must be right after the cache model was
	// cleared, before wrong ones count: if none ever is, clearing does not help.
	confirmations = 3
	// fewMisses is how many predictions in a row must be wrong to clear the cache
	// model. The number doubles with each time, up to manyMisses.
	fewMisses, manyMisses = 5, 80
	// fewPrompts is the least number of prompts or sessions with wrong predictions.
	fewPrompts = 3
	// forgiven is the time after which fewMisses counts again.
	forgiven = time.Hour
)

// cacheCheck compares predicted with reported cached tokens. An engine that has restarted
// unseen, or flushed its cache, reports far less from then on, for all prompts.
type cacheCheck struct {
	mu         sync.Mutex
	confirmed  int
	misses     int // in a row
	prompts    [fewPrompts]uint64
	different  int       // number of prompts
	cleared    time.Time // last, for any reason
	mismatched time.Time // last cleared by this check
	needed     int       // misses for that; 0 = fewMisses
	reports    map[ReportKind]bool
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
	d.confirmed, d.misses, d.different, d.cleared = 0, 0, 0, t
	d.reports = nil // it may be another version
}

// reported records whether an answer of a kind reports what was cached, and returns
// whether any of that kind did.
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

// compare records how many tokens of a prompt a worker was predicted to hold, and how
// many it reports. It returns whether the cache model must be wrong as a whole.
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
		d.misses, d.different = 0, 0
		return false
	case reported*2 >= predicted || predicted-reported < substantial || d.confirmed < confirmations:
		return false
	}
	d.misses++
	if d.different < fewPrompts && !slices.Contains(d.prompts[:d.different], prompt) {
		d.prompts[d.different] = prompt
		d.different++
	}
	if now.Sub(d.mismatched) > forgiven {
		d.needed = fewMisses
	}
	if d.misses < d.needed || d.different < fewPrompts {
		return false
	}
	d.mismatched, d.needed = now, min(2*d.needed, manyMisses)
	return true
}

// CachedTokens returns how many tokens of the prompt the engine had cached, -1 if unknown.
// Some engines omit a count of 0: an omission means 0 if another answer of the kind had one.
func (w *Worker) CachedTokens(kind ReportKind, reported int64) int64 {
	if !w.Engine.Info().OmitsZeroCached() {
		return reported
	}
	if !w.cacheCheck.reported(kind, reported >= 0) {
		return -1
	}
	return max(reported, 0)
}
