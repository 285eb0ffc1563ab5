package kvscore

import (
	"strings"
	"sync"
)

// DefaultBytesPerToken is assumed of a model until its answers have told.
const DefaultBytesPerToken = 4.0

const (
	// maxRatios bounds the models remembered; model names come from clients.
	maxRatios = 1024
	// minRatioTokens is the shortest prompt to learn from: the chat template's
	// own tokens weigh too much in shorter ones.
	minRatioTokens = 32
	ratioWeight    = 0.2
)

// Ratios learns for each model how many bytes of prompt text make a token.
// The zero value is ready for use, by many goroutines.
type Ratios struct {
	mu    sync.RWMutex
	model map[string]float64
}

// BytesPerToken returns the model's ratio, DefaultBytesPerToken if unknown.
func (r *Ratios) BytesPerToken(model string) float64 {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if ratio, ok := r.model[model]; ok {
		return ratio
	}
	return DefaultBytesPerToken
}

// Learn takes in that an engine counted tokens in a prompt of so many bytes of
// text. Prompts of a few tokens, and ratios that no tokenizer has, teach
// nothing.
func (r *Ratios) Learn(model string, bytes, tokens int64) {
	if tokens < minRatioTokens || bytes <= 0 {
		return
	}
	seen := float64(bytes) / float64(tokens)
	if seen < 0.25 || seen > 64 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.model == nil {
		r.model = make(map[string]float64)
	}
	known, ok := r.model[model]
	if !ok {
		if len(r.model) >= maxRatios {
			return
		}
		known = seen
		model = strings.Clone(model) // it may point into a request body
	}
	r.model[model] = known + ratioWeight*(seen-known)
}
