package pool

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Prediction is what a worker was predicted to hold of a prompt when an attempt was
// booked.
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
		w.Misses.note(off, off <= p.page(w))
	}
	if reported*4 < predicted*3 { // engines differ in whether they find what others still compute
		predicted -= int64(of.Shared * float64(p.Settings.Load().BlockSize))
	}
	if w.cacheCheck.compare(time.Now(), of.Begun, of.Prompt, predicted, reported) {
		p.clear(w, clearedMismatch)
		w.Engine.AskAgain()
	}
}

// page returns how many tokens a block has that the worker's engine reuses whole,
// as it tells, else as prompts are compared.
func (p *Pool) page(w *Worker) int64 {
	if n := w.Engine.Last().BlockSize; n > 0 {
		return int64(n)
	}
	return int64(p.Settings.Load().BlockSize)
}

// keptMisses is how many errors are kept.
const keptMisses = 512

// misses keeps the errors of the last predictions, in tokens.
type misses struct {
	mu     sync.Mutex
	off    [keptMisses]int32 // a ring
	within [keptMisses]bool  // one of the engine's blocks
	n      int
}

func (m *misses) note(off int64, within bool) {
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
func (m *misses) View() *MissesView {
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

// hits are sums over the prompts that a worker has computed, in tokens: predicted when
// the attempt was booked, and as the engine reported them.
type hits struct {
	Foreseen, Estimated atomic.Int64
	Cached, Prompt      atomic.Int64
}

func (h *hits) Predicted(cached, prompt int64) {
	h.Foreseen.Add(cached)
	h.Estimated.Add(prompt)
}

func (h *hits) Reported(cached, prompt int64) {
	h.Cached.Add(cached)
	h.Prompt.Add(prompt)
}
