package kvscore

import "math"

// Defaults of PrefixHash.
const (
	DefaultPrefixTokens = 256
	DefaultLoadFactor   = 1.25
)

// PrefixHash gives prompts that begin alike to one target, whatever it holds:
// the first in the rendezvous order of the prompt's beginning that the load
// bound allows. When a target goes, only what it had moves; when one comes, it
// takes its share of each of the others.
//
// The bound is that of consistent hashing with bounded loads (Mirrokni, Thorup
// and Zadimoghaddam, 2016): with the new one, a target has at most
// ceil(LoadFactor × all active requests / targets). Prompts without a full
// block go where the load is least. Costs are left only for these.
type PrefixHash struct {
	// Tokens is how much of a prompt counts as its beginning, rounded to full
	// blocks, at least one. Of a shorter prompt all of its full blocks count.
	// 0 stands for DefaultPrefixTokens.
	Tokens int
	// LoadFactor is what a target may have in terms of the mean. From 1 on
	// there is always a target below the bound; 1 is strictly even. 0 stands
	// for DefaultLoadFactor.
	LoadFactor float64

	unknown LeastLoad // for prompts without blocks
}

// Choose implements Policy.
func (p *PrefixHash) Choose(s *Selection) int {
	if len(s.Blocks) == 0 {
		return p.unknown.Choose(s)
	}
	prefix, bound := p.prefix(s), p.bound(s)
	best, most := -1, uint64(0)
	for i := range s.Candidates {
		c := &s.Candidates[i]
		if float64(c.Requests+1) > bound {
			continue
		}
		if rank := rendezvous(prefix, c.Target); best < 0 || rank > most {
			best, most = i, rank
		}
	}
	if best < 0 { // a factor below 1 may allow none
		return p.unknown.Choose(s)
	}
	return best
}

// bound returns the most requests that a target may have with the new one.
func (p *PrefixHash) bound(s *Selection) float64 {
	factor := p.LoadFactor
	if factor == 0 {
		factor = DefaultLoadFactor
	}
	all := 1
	for i := range s.Candidates {
		all += s.Candidates[i].Requests
	}
	return math.Ceil(factor * (float64(all) / float64(len(s.Candidates))))
}

// prefix returns the hash of the prompt's root and its first blocks.
func (p *PrefixHash) prefix(s *Selection) uint64 {
	tokens := float64(p.Tokens)
	if p.Tokens == 0 {
		tokens = DefaultPrefixTokens
	}
	// Not by what was learned of the text's tokens: where a prompt's beginning
	// ends must stay, or else all prompts would move at once.
	n := max(1, math.Round(tokens/s.NominalBlockTokens))
	n = min(n, float64(len(s.Blocks)))
	hash := mix(s.Root)
	for _, block := range s.Blocks[:int(n)] {
		hash = mix(hash ^ block)
	}
	return hash
}

// rendezvous ranks a target for a prefix: the highest comes first. Each prefix
// has an order of its own, in which a target's place depends on no other's.
func rendezvous(prefix uint64, t Target) uint64 {
	return mix(prefix ^ mix(t.Worker^mix(uint64(t.Rank))))
}

// mix scatters the bits of x: the output function of SplitMix64 (Steele, Lea
// and Flood, 2014), with its increment, so that 0 is scattered, too.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
