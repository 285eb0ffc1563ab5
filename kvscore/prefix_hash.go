package kvscore

import (
	"cmp"
	"math"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Defaults of PrefixHash.
const (
	DefaultPrefixTokens = 256
	DefaultLoadFactor   = 1.25
)

// PrefixHash sends prompts with the same beginning to one target. It takes the first
// target in the rendezvous order of the beginning that the load bound allows. If a target
// leaves, only its prompts move. A new target takes a share from each of the others.
//
// The bound is that of consistent hashing with bounded loads (Mirrokni, Thorup and
// Zadimoghaddam, 2016). With the new request, a target has at most
// ceil(LoadFactor × all active requests / targets). Prompts without a full block go to the
// least loaded target. Only these get costs.
type PrefixHash struct {
	// The length of a prompt's beginning in tokens, of which full blocks count. Four
	// bytes of text count as one token. Default: `256`.
	PrefixTokens int `json:"prefix_tokens,omitempty"`

	// The bound of a worker's active requests, as a multiple of the mean. With the new
	// request it has at most ceil(load_factor × requests / workers). At least 1. A factor
	// of the number of workers or more bounds nothing. Default: `1.25`.
	LoadFactor float64 `json:"load_factor"`
}

// Choose implements Policy.
func (p *PrefixHash) Choose(s *Selection) int {
	if len(s.Blocks) == 0 {
		return new(LeastLoad).Choose(s)
	}
	bound := p.bound(s)
	s.tied = s.tied[:0]
	for i := range s.Candidates {
		if float64(s.Candidates[i].Requests+1) <= bound {
			s.tied = append(s.tied, i)
		}
	}
	if len(s.tied) == 0 { // a factor below 1 may allow none
		return new(LeastLoad).Choose(s)
	}
	return s.first(p.prefix(s), s.tied)
}

// bound returns the most requests that a target may have with the new one.
func (p *PrefixHash) bound(s *Selection) float64 {
	all := 1
	for i := range s.Candidates {
		all += s.Candidates[i].Requests
	}
	return math.Ceil(cmp.Or(p.LoadFactor, DefaultLoadFactor) * (float64(all) / float64(len(s.Candidates))))
}

// prefix returns the hash of the prompt's root and its first blocks.
func (p *PrefixHash) prefix(s *Selection) uint64 {
	// The learned tokens per block would move the end of the beginning, and so all
	// prompts at once.
	n := max(1, math.Round(float64(cmp.Or(p.PrefixTokens, DefaultPrefixTokens))/s.NominalBlockTokens))
	n = min(n, float64(len(s.Blocks)))
	hash := cache.Mix(s.Root)
	for _, block := range s.Blocks[:int(n)] {
		hash = cache.Mix(hash ^ block)
	}
	return hash
}

// rendezvous ranks a target for a prefix or a session; the highest rank is first. Each has
// its own order, and a target's rank does not depend on other targets.
func rendezvous(hash uint64, t Target) uint64 {
	return cache.Mix(hash ^ cache.Mix(t.Worker^cache.Mix(uint64(t.Rank))))
}
