package exact

import (
	"math/bits"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
)

// Match is the answer of [Index.Match]. Reuse it: its memory is kept.
type Match struct {
	// Depth is, by tier and target, how many leading blocks the target holds without a hole.
	// A block counts in a tier if the target holds it there or in a faster tier. Depths
	// therefore never shrink from one tier to the next. A target beyond the slices holds
	// nothing.
	Depth [Tiers][]int32

	live  [Tiers][]uint64 // targets that hold all so far
	tiers int             // that are in use
}

// Match finds how many leading blocks of a chain each target holds, in each tier. The chain may be in
// pieces. Match does not allocate once m is large enough for all targets.
func (x *Index) Match(root uint64, m *Match, pieces ...[]uint64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	m.tiers = 1
	if x.slower {
		m.tiers = Tiers
	}
	m.reset(len(x.owners))
	n := x.follow(root, pieces, m)
	m.cut(&set{}, nil, n)
	for t := m.tiers; t < Tiers; t++ {
		copy(m.Depth[t], m.Depth[Device])
	}
}

func (m *Match) reset(targets int) {
	words := (targets + 63) / 64
	for t := range m.Depth {
		if cap(m.Depth[t]) < targets {
			m.Depth[t], m.live[t] = make([]int32, targets), make([]uint64, words)
		}
		m.Depth[t], m.live[t] = m.Depth[t][:targets], m.live[t][:words]
		clear(m.Depth[t])
		for w := range m.live[t] {
			m.live[t][w] = ^uint64(0) >> max(0, 64*(w+1)-targets)
		}
	}
}

// follow goes along a chain as far as any target holds it. It returns the number of blocks.
func (x *Index) follow(root uint64, pieces [][]uint64, m *Match) (n int) {
	last := ^uint32(0) // no set
	var r *run
	i := 0 // the next block of the run
	for _, rest := range pieces {
		for len(rest) > 0 {
			k := 0
			if r != nil {
				k = approx.Common(r.hashes[i:], rest)
			}
			if k == 0 {
				from := start{root: root, hash: rest[0]}
				if r != nil {
					from.up = r.at(i - 1)
				}
				if r, i = x.starts[from], 0; r == nil {
					return n
				}
				continue
			}
			blocks := r.blocks[i : i+k]
			for at := 0; at < k; {
				if set := blocks[at].set; set != last {
					if last = set; !m.cut(&x.sets.list[last], x.sharing, n+at) {
						return n + at
					}
				}
				for at++; at < k && blocks[at].set == last; at++ {
				}
			}
			i, n, rest = i+k, n+k, rest[k:]
		}
	}
	return n
}

// cut takes the targets that do not hold the next block out of the live ones. It reports whether any
// is left in the slowest tier, which has all that the others have.
func (m *Match) cut(s *set, sharing mask, depth int) bool {
	if len(s.tier[Shared]) == 0 {
		sharing = nil
	}
	left := uint64(0)
	for w := range m.live[Device] {
		held := uint64(0)
		for t := range m.tiers {
			held |= s.tier[t].word(w)
			if t == int(Shared) {
				held |= sharing.word(w)
			}
			live := m.live[t][w]
			m.live[t][w] = live & held
			if depth > 0 {
				m.lose(t, w, live&^held, depth)
			}
		}
		left |= m.live[m.tiers-1][w]
	}
	return left != 0
}

// lose writes how much targets of a word hold.
func (m *Match) lose(tier, word int, gone uint64, depth int) {
	of := m.Depth[tier]
	for ; gone != 0; gone &= gone - 1 {
		of[word*64+bits.TrailingZeros64(gone)] = int32(depth) //nolint:gosec // a number of blocks
	}
}
