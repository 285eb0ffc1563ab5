package approx

import (
	"slices"
	"testing"
)

func TestMatchTellsWhetherItEndsWhereChainsDo(t *testing.T) {
	long, other := seq(1, 10), seq(100, 10)
	fork := slices.Concat(long[:5], seq(200, 3))
	for name, tc := range map[string]struct {
		known  [][]uint64
		asked  []uint64
		blocks int
		want   bool
	}{
		"nothing is known":            {nil, long, 0, false},
		"nothing matches":             {[][]uint64{long}, other, 0, false},
		"nothing is asked":            {[][]uint64{long}, nil, 0, false},
		"the same chain":              {[][]uint64{long}, long, 10, true},
		"the next turn":               {[][]uint64{long}, slices.Concat(long, other), 10, true},
		"a part of it":                {[][]uint64{long}, long[:5], 5, false},
		"one that leaves it midway":   {[][]uint64{long}, fork, 5, false},
		"where two have parted":       {[][]uint64{long, fork}, slices.Concat(long[:5], other), 5, true},
		"within one branch of two":    {[][]uint64{long, fork}, slices.Concat(long[:7], other), 7, false},
		"the end of one branch":       {[][]uint64{long, fork}, slices.Concat(fork, other), 8, true},
		"an end within a longer one":  {[][]uint64{long[:5], long}, slices.Concat(long[:5], other), 5, true},
		"beyond such an end":          {[][]uint64{long[:5], long}, slices.Concat(long[:8], other), 8, false},
		"a later turn":                {[][]uint64{long[:5], long[:8], long}, slices.Concat(long, other), 10, true},
		"the shorter chain came last": {[][]uint64{long, long[:5]}, slices.Concat(long[:5], other), 5, true},
	} {
		x := declared(2)
		for i, blocks := range tc.known {
			x.Touch(i%2, &Chain{Root: 1, Blocks: blocks, Weights: Same(1000)}, 0)
		}
		m := Match{AtEnd: true} // of the match before
		if x.Match(&Chain{Root: 1, Blocks: tc.asked}, &m); m.Blocks != tc.blocks || m.AtEnd != tc.want {
			t.Errorf("%s: %d blocks match, at an end %v; want %d, %v", name, m.Blocks, m.AtEnd, tc.blocks, tc.want)
		}
	}
}
