// Package rules has the published routing rules that the router does not offer, for
// comparison in replays only. They see what the router sees: overlap and load as
// the scheduler knows them. Where a rule reads gauges of engines or the client's
// session, the replay supplies them.
package rules

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
)

// View is what the replay tells the rules beside the Selection. A candidate's
// position is that of its engine.
type View struct {
	// Now is the virtual time.
	Now time.Duration
	// Session is the session of the request that is placed.
	Session int
	// Block is the number of tokens in a block.
	Block int
	// Exact lets the rules see the blocks that the engines hold, in place of the
	// scheduler's cache model.
	Exact bool
	// Model is the model of all engines.
	Model *engine.Model
	// Engines are the engines that there are now. One that joins comes last.
	Engines []*engine.Engine
}

// held returns how many tokens of the prompt candidate i holds.
func (v *View) held(s *kvscore.Selection, i int) int64 {
	if v.Exact {
		return int64(v.Engines[i].Cache().Held(s.Blocks) * v.Block)
	}
	return int64(s.Candidates[i].OverlapBlocks*float64(s.BlockSize) + 0.5)
}

// cached returns how many tokens of the prompt candidate i would not compute.
func (v *View) cached(s *kvscore.Selection, i int) int64 {
	if v.Exact {
		block := int64(v.Block)
		return max(0, min(v.held(s, i), s.Tokens-1)/block*block)
	}
	return s.Candidates[i].OverlapTokens
}

// Observer is a rule that keeps books of its own.
type Observer interface {
	// Placed is called after the choice, with the request's number. The choice may
	// have been made by another, such as a session's binding.
	Placed(s *kvscore.Selection, request, at int)
	// FirstToken is called when the request's prefill is over.
	FirstToken(request, at int)
}

// least sets the costs and returns a candidate with the lowest; equal ones share evenly.
type least struct{}

func (least) choose(s *kvscore.Selection, cost func(i int) float64) int {
	for i := range s.Candidates {
		s.Candidates[i].Cost = cost(i)
	}
	return s.Cheapest()
}

// StickyHash gives all requests of a session to one target, by rendezvous hashing.
// It knows neither overlap nor load.
type StickyHash struct{ View *View }

// Choose implements kvscore.Policy.
func (h *StickyHash) Choose(s *kvscore.Selection) int {
	best, most := 0, uint64(0)
	for i := range s.Candidates {
		rank := mix(mix(uint64(h.View.Session)^s.Root) ^ mix(s.Candidates[i].Target.Worker))
		if rank > most {
			best, most = i, rank
		}
	}
	return best
}

// mix scatters the bits of x: the output function of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// LMetric takes the lowest product of prefill tokens, those booked and those that
// the prompt lacks, and requests, this one included (arXiv 2603.15202).
type LMetric struct {
	View *View
	least
}

// Choose implements kvscore.Policy.
func (l *LMetric) Choose(s *kvscore.Selection) int {
	return l.choose(s, func(i int) float64 {
		c := &s.Candidates[i]
		lacks := max(1, s.Tokens-l.View.cached(s, i))
		return float64(c.PrefillTokens+lacks) * float64(c.Requests+1)
	})
}

// GAIE is the default profile of the Gateway API Inference Extension and llm-d. It
// takes the highest 3 × match + 2 × (1 − queue) + 2 × (1 − KV use). match is the
// share of the prompt that matches, of its first 256 blocks only. queue is
// normalised to the range among the candidates. Queue and KV use are the engines'
// own gauges, read every 50 ms as llm-d does by default.
type GAIE struct {
	View *View
	least
	gauges []gauges
	read   time.Duration // a multiple of scrape
}

type gauges struct {
	waiting int
	usage   float64
}

const (
	// gaieBlocks bounds the match, in blocks of Selection.BlockSize.
	gaieBlocks = 256
	scrape     = 50 * time.Millisecond
)

// Choose implements kvscore.Policy.
func (g *GAIE) Choose(s *kvscore.Selection) int {
	g.scrape()
	fewest, most := g.gauges[0].waiting, 0
	for _, e := range g.gauges {
		fewest, most = min(fewest, e.waiting), max(most, e.waiting)
	}
	return g.choose(s, func(i int) float64 {
		e := g.gauges[i]
		match, queue := 0.0, 1.0
		if blocks := min(gaieBlocks, s.RequestBlocks); blocks > 0 {
			match = min(float64(g.View.held(s, i))/float64(s.BlockSize), blocks) / blocks
		}
		if most > fewest {
			queue = float64(most-e.waiting) / float64(most-fewest)
		}
		return -(3*match + 2*queue + 2*(1-e.usage))
	})
}

// scrape reads the gauges, at most once in an interval.
func (g *GAIE) scrape() {
	now := g.View.Now.Truncate(scrape)
	if now == g.read && len(g.gauges) == len(g.View.Engines) {
		return
	}
	g.read, g.gauges = now, g.gauges[:0]
	for _, e := range g.View.Engines {
		g.gauges = append(g.gauges, gauges{e.Waiting(), e.Usage()})
	}
}

// CacheAware is SGLang's cache_aware. If the loads differ by more than 64 requests
// and by half, it takes the fewest requests. Otherwise it takes the best match if
// that is above 0.3 of the prompt, else the smallest tree. The match is the
// router's, not SGLang's own tree of text. The tree's size is the tokens that a
// target was sent and did not hold.
type CacheAware struct {
	View *View
	least
	trees []float64
}

const (
	cacheThreshold = 0.3
	balanceAbs     = 64
	balanceRel     = 1.5
)

// Choose implements kvscore.Policy.
func (a *CacheAware) Choose(s *kvscore.Selection) int {
	a.trees = grown(a.trees, len(s.Candidates))
	fewest, most, best := s.Candidates[0].Requests, 0, int64(0)
	for i := range s.Candidates {
		n := s.Candidates[i].Requests
		fewest, most = min(fewest, n), max(most, n)
		best = max(best, a.View.held(s, i))
	}
	switch {
	case most-fewest > balanceAbs && float64(most) > balanceRel*float64(fewest):
		return a.choose(s, func(i int) float64 { return float64(s.Candidates[i].Requests) })
	case float64(best) > cacheThreshold*float64(s.Tokens):
		return a.choose(s, func(i int) float64 { return -float64(a.View.held(s, i)) })
	}
	return a.choose(s, func(i int) float64 { return a.trees[i] })
}

// Placed implements Observer.
func (a *CacheAware) Placed(s *kvscore.Selection, _, at int) {
	a.trees = grown(a.trees, len(s.Candidates))
	a.trees[at] += float64(s.Tokens - min(s.Tokens, a.View.held(s, at)))
}

// FirstToken implements Observer.
func (a *CacheAware) FirstToken(int, int) {}

// grown returns a list with at least n elements.
func grown[T any](list []T, n int) []T {
	if n <= len(list) {
		return list
	}
	return append(list, make([]T, n-len(list))...)
}
