package kvscore

import (
	"math"
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// asked returns a selection of a prompt among idle targets 1 to n.
func asked(n int, root uint64, blocks ...uint64) *Selection {
	s := &Selection{
		Root: root, Blocks: blocks, NominalBlockTokens: 16, BlockSize: 16,
		Findings: Findings{Tokens: int64(len(blocks)) * 16}, Rand: seeded(1),
	}
	for _, t := range targets(n) {
		s.Candidates = append(s.Candidates, Candidate{Target: t})
	}
	return s
}

// chosen returns the target that p chooses.
func chosen(p Policy, s *Selection) Target { return s.Candidates[p.Choose(s)].Target }

func TestPrefixHashGoesByTheBeginning(t *testing.T) {
	p := &PrefixHash{}
	others := 0
	for i := range uint64(100) {
		blocks := distinct(i, 40)
		first := chosen(p, asked(8, 1, blocks...))
		later := append(slices.Clone(blocks[:16]), distinct(i+1000, 90)...)
		if got := chosen(p, asked(8, 1, later...)); got != first {
			t.Errorf("prompt %d: %s has the first 256 tokens, %s another prompt with the same", i, first, got)
		}
		reversed := asked(8, 1, blocks...)
		slices.Reverse(reversed.Candidates)
		if got := chosen(p, reversed); got != first {
			t.Errorf("prompt %d: the order of the candidates matters", i)
		}
		for _, s := range []*Selection{asked(8, 2, blocks...), asked(8, 1, blocks[1:]...), asked(8, 1, blocks[:15]...)} {
			if chosen(p, s) != first {
				others++
			}
		}
	}
	if others < 220 { // 7/8 of 300
		t.Errorf("of 300 other beginnings %d are elsewhere, want about 262", others)
	}
}

// What is learned of the text's tokens must not move a prompt.
func TestPrefixHashIgnoresTheLearnedRatio(t *testing.T) {
	s, ts := declared(8)
	sel := &Selection{Rand: seeded(1)}
	for i := range uint64(50) {
		r := &Request{Prompt: cache.Prompt{Root: 1, Blocks: distinct(i, 40), BlockTokens: 16}, NominalBlockTokens: 16}
		first, l := s.selectOf(epoch, r, ts, -1, &PrefixHash{}, sel)
		l.End(true, nil)
		r.BlockTokens = 16 * (0.5 + float64(i)/25)
		again, l := s.selectOf(epoch, r, ts, -1, &PrefixHash{}, sel)
		l.End(true, nil)
		if again != first {
			t.Errorf("with %v tokens a block it moves from %d to %d", r.BlockTokens, first, again)
		}
	}
}

func TestPrefixHashMovesNoMoreThanItMust(t *testing.T) {
	const prompts, n = 4000, 10
	p := &PrefixHash{}
	first := make([]Target, prompts)
	have := make(map[Target]int)
	for i := range first {
		first[i] = chosen(p, asked(n, 1, uint64(i)))
		have[first[i]]++
	}
	for target, k := range have {
		if k < 320 || k > 480 { // four standard deviations
			t.Errorf("%s has %d of %d prompts, want about %d", target, k, prompts, prompts/n)
		}
	}
	gone, moved := targets(n)[3], make(map[Target]int)
	for i := range first {
		s := asked(n, 1, uint64(i))
		s.Candidates = slices.DeleteFunc(s.Candidates, func(c Candidate) bool { return c.Target == gone })
		switch got := chosen(p, s); {
		case first[i] == gone:
			moved[got]++
		case got != first[i]:
			t.Fatalf("prompt %d was not on the target that went, and moved from %s to %s", i, first[i], got)
		}
	}
	if len(moved) != n-1 {
		t.Errorf("what the target had goes to %d others, want all: %v", len(moved), moved)
	}
	took := 0
	for i := range first {
		switch got := chosen(p, asked(n+1, 1, uint64(i))); {
		case got.Worker == n+1:
			took++
		case got != first[i]:
			t.Fatalf("prompt %d moved from %s to %s, which was there before", i, first[i], got)
		}
	}
	if took < 290 || took > 440 {
		t.Errorf("the new target takes %d of %d prompts, want about %d", took, prompts, prompts/(n+1))
	}
}

// The bound holds after every booking as long as nothing ends, and the target that
// is chosen is the first in order below it.
func TestPrefixHashKeepsTheBound(t *testing.T) {
	for _, factor := range []float64{0, 1, 1.1, 1.25, 2} {
		p := &PrefixHash{LoadFactor: factor}
		bound := factor
		if factor == 0 {
			bound = 1.25
		}
		rnd := seeded(9)
		for range 300 {
			n := 1 + rnd.IntN(9)
			few := 1 + rnd.IntN(3) // beginnings, some of which all ask for
			s := asked(n, 1, 0)
			for all := 1; all < 60; all++ {
				s.Blocks[0] = uint64(rnd.IntN(few))
				i := p.Choose(s)
				if c := s.Candidates[i].Requests + 1; float64(c) > math.Ceil(bound*float64(all)/float64(n)) {
					t.Fatalf("factor %v: %d of %d requests on one of %d targets", factor, c, all, n)
				}
				s.Candidates[i].Requests++
			}
		}
	}
}

// Take n targets of which no two have the same load. The policy chooses the one
// that k others beat when it is drawn with one of the n−1−k worse ones.
func TestPowerOfTwoTakesTheBetterOfTwo(t *testing.T) {
	const n, times = 5, 40_000
	s := asked(n, 1)
	for i := range s.Candidates {
		s.Candidates[i].Requests = []int{2, 1, 1, 2, 3}[i]
		s.Candidates[i].PrefillTokens = []int64{100, 0, 50, 200, 0}[i]
	}
	order := []int{1, 2, 0, 3, 4}
	got := counts(PowerOfTwo{}, s, times)
	for k, i := range order {
		want := times * 2 * (n - 1 - k) / (n * (n - 1))
		if math.Abs(float64(got[i]-want)) > times/100 {
			t.Errorf("candidate %d, in place %d, was chosen %d times, want about %d", i, k, got[i], want)
		}
	}
	if got[4] != 0 {
		t.Errorf("the most loaded one was chosen %d times: one was drawn twice", got[4])
	}
	for i, k := range counts(PowerOfTwo{}, asked(n, 1), times) {
		if math.Abs(float64(k-times/n)) > times/100 {
			t.Errorf("idle candidate %d was chosen %d times of %d", i, k, times)
		}
	}
	if i := (PowerOfTwo{}).Choose(asked(1, 1)); i != 0 {
		t.Errorf("chose %d of one", i)
	}
	s = asked(3, 1)
	s.Candidates[0].Requests, s.Candidates[1].Requests, s.Candidates[2].Requests = 5, 5, 5
	PowerOfTwo{}.Choose(s)
	costs := 0.0
	for _, c := range s.Candidates {
		costs += c.Cost
	}
	if costs != 10 {
		t.Errorf("the costs add up to %v, want those of two", costs)
	}
}
