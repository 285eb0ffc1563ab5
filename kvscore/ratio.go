package kvscore

import (
	"hash/maphash"
	"math"
	"sync"

	"github.com/caddy-kvrouter/kvrouter/kvscore/index"
)

// DefaultBytesPerToken is assumed while no answer has told.
const DefaultBytesPerToken = 4.0

const (
	// maxRatios bounds the models remembered; model names come from clients.
	maxRatios = 1024
	// minRatioTokens is the shortest text to learn from: the chat template's own
	// tokens weigh too much in shorter ones.
	minRatioTokens = 32
	// ratioWeight is how far a long text moves what is known; one of halfWeight
	// tokens moves it half as far.
	ratioWeight, halfWeight = 0.5, 256
	// minRatio and maxRatio, in bytes per token, are beyond what any tokenizer
	// does with text.
	minRatio, maxRatio = 0.5, 64.0
)

// ratioSeed makes hashes of names differ between processes, so that nobody can
// choose names that collide.
var ratioSeed = maphash.MakeSeed()

// Ratios learns for each model how many bytes of text make a token, for each kind
// of text (see [TextBlock]). The 1024 models used last are remembered. The zero
// value is ready for use, by many goroutines.
type Ratios struct {
	mu     sync.Mutex
	all    textRatios // over all models
	models map[uint64]*modelRatio
	used   modelRatio // the ring of all, newest first, begins and ends here
}

// modelRatio is what is known of one model. Names are kept as hashes only:
// they may be long.
type modelRatio struct {
	name         uint64
	ratios       textRatios
	newer, older *modelRatio
}

// textRatios are tokens per byte by the kind of text.
type textRatios struct {
	tokens  [index.Kinds]float64
	learned bool

	size    int                 // of the blocks that weights are for, in bytes
	weights *[index.Kinds]int32 // nil: to be made
}

// prior is where all kinds begin, by the level of their other bytes, in tokens
// per byte.
var prior = [8]float64{0.18, 0.2, 0.22, 0.25, 0.3, 0.36, 0.42, 0.5}

func (t *textRatios) init() {
	if t.tokens[0] != 0 {
		return
	}
	for k := range t.tokens {
		t.tokens[k] = prior[k&7]
	}
}

// weightsOf returns the tokens in blocks of size bytes.
func (t *textRatios) weightsOf(size int) index.Weights {
	t.init()
	if t.weights == nil || t.size != size {
		t.weights, t.size = new([index.Kinds]int32), size
		for k, perByte := range t.tokens {
			t.weights[k] = int32(min(math.Round(perByte*float64(size)*1000), math.MaxInt32/2))
		}
	}
	return index.Weights{Kinds: t.weights}
}

// learn records that a text with so many bytes of each kind has so many tokens.
// The first text changes all kinds alike. Later ones change each kind by its part
// in what was expected.
func (t *textRatios) learn(bytes *[index.Kinds]float64, tokens float64) {
	t.init()
	var expected, squares float64
	var parts [index.Kinds]float64
	for k, n := range bytes {
		parts[k] = n * t.tokens[k]
		expected += parts[k]
	}
	if expected <= 0 {
		return
	}
	for _, p := range parts {
		squares += (p / expected) * (p / expected)
	}
	off := math.Log(tokens / expected)
	move := ratioWeight * tokens / (tokens + halfWeight)
	for k := range t.tokens {
		by := off * move * min(1, parts[k]/expected/squares)
		if !t.learned {
			by = off
		}
		t.tokens[k] = min(max(t.tokens[k]*math.Exp(by), 1/maxRatio), 1/minRatio)
	}
	t.learned, t.weights = true, nil
}

// Weights returns the tokens in blocks of size bytes of a model's text: the
// model's own; those over all models while the model has not shown its own; the
// defaults while none has. They do not change any more.
func (r *Ratios) Weights(model string, size int) index.Weights {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m := r.find(model); m != nil {
		return m.ratios.weightsOf(size)
	}
	return r.all.weightsOf(size)
}

// Known returns whether the model has shown its own ratios.
func (r *Ratios) Known(model string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.find(model) != nil
}

// Learn records that an engine counted so many tokens in a text: full blocks of
// size bytes, and past blocks more of unknown kind. Texts of less than 32 tokens,
// and ratios that no tokenizer has, teach nothing.
func (r *Ratios) Learn(model string, blocks []uint64, past float64, size int, tokens float64) {
	n := float64(len(blocks)) + max(0, past)
	seen := n * float64(size) / tokens
	if tokens < minRatioTokens || len(blocks) == 0 || !(seen >= minRatio && seen <= maxRatio) {
		return
	}
	var bytes [index.Kinds]float64
	each := n * float64(size) / float64(len(blocks))
	for _, b := range blocks {
		bytes[b&index.KindMask] += each
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.learn(&bytes, tokens)
	m := r.find(model)
	if m == nil {
		m = r.add(model)
		m.ratios.tokens = r.all.tokens
	}
	m.ratios.learn(&bytes, tokens)
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
func (r *Ratios) add(model string) *modelRatio {
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
	m.name = maphash.String(ratioSeed, model)
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
