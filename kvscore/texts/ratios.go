package texts

import (
	"cmp"
	"math"
	"slices"
	"sync"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"
)

// BytesPerToken is the assumed ratio until an engine has counted a prompt.
const BytesPerToken = 4.0

const (
	// maxRatios bounds the number of models: their names come from clients.
	maxRatios = 1024
	// minRatioTokens is the shortest text to learn from, in tokens. In shorter ones, the
	// chat template weighs too much.
	minRatioTokens = 32
	// ratioWeight is the weight of a long text. A text of halfWeight tokens weighs half as
	// much.
	ratioWeight, halfWeight = 0.5, 256
	// minRatio and maxRatio, in bytes per token, are outside of any tokenizer's range.
	minRatio, maxRatio = 0.5, 64.0
)

// Ratios learns the bytes per token of each model, for each kind of text (see [Block]).
// It keeps 1024 models; another one takes the place of one with few texts. The zero value is ready
// for use by many goroutines.
type Ratios struct {
	// Seed keys the hashes of models' names, so that clients cannot choose colliding names.
	// After the first use, only Rekey changes it.
	Seed uint64

	mu     sync.Mutex
	all    textRatios             // over all models
	models map[uint64]*textRatios // by the hashes of their names, which may be long
}

// textRatios are tokens per byte by the kind of text.
type textRatios struct {
	tokens  [cache.Kinds]float64
	learned bool
	texts   int // learned from

	size    int                 // block size of weights, in bytes
	weights *[cache.Kinds]int32 // nil until computed
}

// prior is the initial ratio, by the level of bytes that are not letters, in tokens per
// byte.
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
func (t *textRatios) weightsOf(size int) cache.Weights {
	t.init()
	if t.weights == nil || t.size != size {
		t.weights, t.size = new([cache.Kinds]int32), size
		for k, perByte := range t.tokens {
			t.weights[k] = int32(min(math.Round(perByte*float64(size)*1000), math.MaxInt32/2))
		}
	}
	return cache.Weights{Kinds: t.weights}
}

// learn records the tokens of a text with the given bytes of each kind. The first text
// changes all kinds alike. Later ones change each kind by its share of the expected
// tokens.
func (t *textRatios) learn(bytes *[cache.Kinds]float64, tokens float64) {
	t.init()
	var expected, squares float64
	var parts [cache.Kinds]float64
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
	t.texts++
}

// Rekey replaces the Seed. It forgets the models, and what all have in common stays.
func (r *Ratios) Rekey(seed uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Seed, r.models = seed, nil
}

// Weights returns the tokens in blocks of size bytes of a model's text. If the model is
// unknown, they are the average over all models, or the defaults. The result never changes.
func (r *Ratios) Weights(model string, size int) cache.Weights {
	r.mu.Lock()
	defer r.mu.Unlock()
	return cmp.Or(r.models[r.hash(model)], &r.all).weightsOf(size)
}

func (r *Ratios) hash(model string) uint64 { return xxh3.HashStringSeed(model, r.Seed) }

// Learn records the tokens that an engine counted in a text of full blocks of size bytes,
// and past blocks more of unknown kind. It ignores texts of less than 32 tokens, and
// ratios outside of any tokenizer's range.
func (r *Ratios) Learn(model string, blocks []uint64, past float64, size int, tokens float64) {
	n := float64(len(blocks)) + max(0, past)
	seen := n * float64(size) / tokens
	if tokens < minRatioTokens || len(blocks) == 0 || !(seen >= minRatio && seen <= maxRatio) {
		return
	}
	var bytes [cache.Kinds]float64
	each := n * float64(size) / float64(len(blocks))
	for _, b := range blocks {
		bytes[b&cache.KindMask] += each
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.learn(&bytes, tokens)
	name := r.hash(model)
	m := r.models[name]
	if m == nil {
		m = &textRatios{tokens: r.all.tokens}
		r.add(name, m)
	}
	m.learn(&bytes, tokens)
}

// add adds a model by the hash of its name. At the bound it replaces the one of some that has the
// fewest texts: one client may invent many names. The lock is held.
func (r *Ratios) add(name uint64, m *textRatios) {
	if r.models == nil {
		r.models = make(map[uint64]*textRatios)
	}
	if len(r.models) >= maxRatios {
		least, fewest, seen := uint64(0), math.MaxInt, 0
		for other, o := range r.models {
			if o.texts < fewest {
				least, fewest = other, o.texts
			}
			if seen++; seen == 16 {
				break
			}
		}
		delete(r.models, least)
	}
	r.models[name] = m
}

// ModelRatios are the tokens per byte of a model's text, by its kind.
type ModelRatios struct {
	Name   uint64 // hash of the model's name; 0 stands for all models
	Tokens [cache.Kinds]float64
}

// Learned returns the learned ratios: first those over all models, then those of models. It
// returns nil while nothing is learned.
func (r *Ratios) Learned() []ModelRatios {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.all.learned || r.models == nil {
		return nil
	}
	list := append(make([]ModelRatios, 0, len(r.models)+1), ModelRatios{0, r.all.tokens})
	for name, m := range r.models {
		list = append(list, ModelRatios{name, m.tokens})
	}
	return list
}

// Restore takes over what Learned returned, except for models that are known already. It ignores
// values that Learn would not accept.
func (r *Ratios) Restore(list []ModelRatios) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range list {
		one := &list[i]
		if slices.ContainsFunc(one.Tokens[:], func(v float64) bool { return !(v >= 1/maxRatio && v <= 1/minRatio) }) {
			continue
		}
		restored := textRatios{tokens: one.Tokens, learned: true}
		switch {
		case one.Name != 0 && r.models[one.Name] == nil:
			r.add(one.Name, &restored)
		case one.Name == 0 && !r.all.learned:
			r.all = restored
		}
	}
}
