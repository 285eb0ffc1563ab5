package kvscore

import (
	"hash/maphash"
	"sync"
)

// DefaultBytesPerToken is assumed while no answer has told.
const DefaultBytesPerToken = 4.0

const (
	// maxRatios bounds the models remembered; model names come from clients.
	maxRatios = 1024
	// minRatioTokens is the shortest prompt to learn from: the chat template's
	// own tokens weigh too much in shorter ones.
	minRatioTokens = 32
	ratioWeight    = 0.2
	// minRatio and maxRatio are beyond what any tokenizer does with text.
	minRatio, maxRatio = 0.5, 64.0
)

// ratioSeed makes hashes of names differ between processes, so that nobody can
// choose names that collide.
var ratioSeed = maphash.MakeSeed()

// Ratios learns for each model how many bytes of prompt text make a token.
// The 1024 models used last are remembered. The zero value is ready for use,
// by many goroutines.
type Ratios struct {
	mu     sync.Mutex
	all    float64 // over all models; 0 = nothing learned
	models map[uint64]*modelRatio
	used   modelRatio // the ring of all, newest first, begins and ends here
}

// modelRatio is what is known of one model. Names are kept as hashes only:
// they may be long.
type modelRatio struct {
	name         uint64
	ratio        float64
	newer, older *modelRatio
}

// BytesPerToken returns the model's ratio; the ratio over all models while the
// model has not shown its own; DefaultBytesPerToken while none has.
func (r *Ratios) BytesPerToken(model string) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m := r.find(model); m != nil {
		return m.ratio
	}
	if r.all != 0 {
		return r.all
	}
	return DefaultBytesPerToken
}

// Known returns whether the model has shown its own ratio.
func (r *Ratios) Known(model string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.find(model) != nil
}

// Learn takes in that an engine counted tokens in a prompt of so many bytes of
// text. Prompts of less than 32 tokens, and ratios that no tokenizer has, teach
// nothing.
func (r *Ratios) Learn(model string, bytes, tokens int64) {
	if tokens < minRatioTokens {
		return
	}
	seen := float64(bytes) / float64(tokens)
	if seen < minRatio || seen > maxRatio {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == 0 {
		r.all = seen
	}
	r.all += ratioWeight * (seen - r.all)
	m := r.find(model)
	if m == nil {
		m = r.add(model, seen)
	}
	m.ratio += ratioWeight * (seen - m.ratio)
}

// find returns the model, now the one used last, or nil. The lock is held.
func (r *Ratios) find(model string) *modelRatio {
	if r.models == nil {
		return nil
	}
	m := r.models[maphash.String(ratioSeed, model)]
	if m != nil && r.used.older != m {
		m.unlink()
		r.push(m)
	}
	return m
}

// add makes a model known, in place of the one unused longest if there are too
// many. The lock is held.
func (r *Ratios) add(model string, ratio float64) *modelRatio {
	if r.models == nil {
		r.models = make(map[uint64]*modelRatio)
		r.used.newer, r.used.older = &r.used, &r.used
	}
	m := new(modelRatio)
	if len(r.models) >= maxRatios {
		m = r.used.newer // the oldest of the ring
		m.unlink()
		delete(r.models, m.name)
	}
	m.name, m.ratio = maphash.String(ratioSeed, model), ratio
	r.models[m.name] = m
	r.push(m)
	return m
}

func (r *Ratios) push(m *modelRatio) {
	m.newer, m.older = &r.used, r.used.older
	m.older.newer, r.used.older = m, m
}

func (m *modelRatio) unlink() {
	m.newer.older, m.older.newer = m.older, m.newer
}
