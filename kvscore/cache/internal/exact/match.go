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

	live [Tiers][]uint64 // targets that hold all so far
	last [Tiers]*set     // the sets that live was last cut down to
}

func (m *Match) reset(targets int) {
	for t := range m.Depth {
		if cap(m.Depth[t]) < targets {
			m.Depth[t] = make([]int32, targets)
		}
		m.Depth[t] = m.Depth[t][:targets]
		clear(m.Depth[t])
	}
}

// Match finds how many leading blocks of a chain each target holds, in each tier. It does
// not allocate once m is large enough for all targets.
func (x *Index) Match(root uint64, blocks []uint64, m *Match) {
	targets := int(x.targets.Load())
	m.reset(targets)
	if len(blocks) == 0 || targets == 0 {
		return
	}
	r := x.top.Load().find(topKey(root, blocks[0]), root, blocks[0])
	if r == nil {
		return
	}
	switch {
	case x.slower.Load():
		x.matchTiers(r, blocks, m)
		return
	case targets <= 64:
		matchWord(r, blocks, m.Depth[Device])
	default:
		matchWords(r, blocks, m)
	}
	for t := Host; t < Tiers; t++ {
		copy(m.Depth[t], m.Depth[Device])
	}
}

// matchWord is Match for 64 targets that hold blocks on the device alone.
func matchWord(r *run, blocks []uint64, depth []int32) {
	live := ^uint64(0) >> (64 - len(depth))
	pos := 0
	var last *set
	for {
		v := r.view.Load()
		rest := blocks[pos:]
		n := approx.Common(v.hashes, rest)
		from, whole := 0, true
		for i := range v.device {
			s := &v.device[i]
			if s.set == nil {
				whole = false
				break
			}
			if s.set != last {
				now := s.set.word.Load()
				lose(depth, 0, live&^now, pos+from)
				if live &= now; live == 0 {
					return
				}
				last = s.set
			}
			if from = int(s.end); from >= n {
				break
			}
		}
		if from < n || !whole { // nobody holds the next block
			n, whole = from, false
		}
		pos += n
		if !whole || n < len(v.hashes) || n == len(rest) || v.kids == nil {
			break
		}
		block := blocks[pos]
		if r = v.kids.find(keyOf(block), r.root, block); r == nil {
			break
		}
	}
	lose(depth, 0, live, pos)
}

// lose writes the depth of targets that hold no more.
func lose(depth []int32, first int, gone uint64, at int) {
	if at == 0 {
		return
	}
	for ; gone != 0; gone &= gone - 1 {
		depth[first+bits.TrailingZeros64(gone)] = int32(at)
	}
}

// begin makes all targets live.
func (m *Match) begin(t Tier) {
	targets := len(m.Depth[t])
	words := (targets + 63) / 64
	if cap(m.live[t]) < words {
		m.live[t] = make([]uint64, words)
	}
	m.live[t] = m.live[t][:words]
	for w := range m.live[t] {
		m.live[t][w] = ^uint64(0)
	}
	if targets%64 > 0 {
		m.live[t][words-1] = 1<<(targets%64) - 1
	}
	m.last[t] = nil
}

// cut takes targets that are not in the set out of the live ones. It reports whether any is
// left.
func (m *Match) cut(t Tier, s *set, at int) bool {
	if s == nil {
		return false
	}
	if s == m.last[t] {
		return true
	}
	m.last[t] = s
	live := m.live[t]
	now := s.word.Load()
	lose(m.Depth[t], 0, live[0]&^now, at)
	live[0] &= now
	any := live[0]
	for w := 1; w < len(live); w++ {
		if live[w] == 0 {
			continue
		}
		now = 0
		if w <= len(s.more) {
			now = s.more[w-1].Load()
		}
		lose(m.Depth[t], w*64, live[w]&^now, at)
		live[w] &= now
		any |= live[w]
	}
	return any != 0
}

func (m *Match) finish(t Tier, at int) {
	for w, gone := range m.live[t] {
		lose(m.Depth[t], w*64, gone, at)
	}
}

// matchWords is Match for any number of targets that hold blocks on the device alone.
func matchWords(r *run, blocks []uint64, m *Match) {
	m.begin(Device)
	pos := 0
	for r != nil {
		v := r.view.Load()
		rest := blocks[pos:]
		n := approx.Common(v.hashes, rest)
		from := 0
		for i := range v.device {
			s := &v.device[i]
			if !m.cut(Device, s.set, pos+from) {
				m.finish(Device, pos+from)
				return
			}
			if from = int(s.end); from >= n {
				break
			}
		}
		if from < n {
			n = from
		}
		pos += n
		if n < len(v.hashes) || n == len(rest) || v.kids == nil {
			break
		}
		block := blocks[pos]
		r = v.kids.find(keyOf(block), r.root, block)
	}
	m.finish(Device, pos)
}
