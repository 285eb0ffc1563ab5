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

	live [Tiers][]uint64 // columns that hold all so far
	last [Tiers]set      // the sets that live was last cut down to
	of   *columns
}

func (m *Match) reset(c *columns) {
	m.of = c
	for t := range m.Depth {
		if cap(m.Depth[t]) < c.targets {
			m.Depth[t] = make([]int32, c.targets)
		}
		m.Depth[t] = m.Depth[t][:c.targets]
		clear(m.Depth[t])
	}
}

// Match finds how many leading blocks of a chain each target holds, in each tier. It does
// not allocate once m is large enough for all targets.
func (x *Index) Match(root uint64, blocks []uint64, m *Match) {
	for range 3 { // a column may get another target meanwhile
		c := x.columns.Load()
		m.reset(c)
		x.match(root, blocks, m)
		if x.columns.Load() == c {
			break
		}
	}
	m.of = nil
}

func (x *Index) match(root uint64, blocks []uint64, m *Match) {
	if len(blocks) == 0 || m.of.targets == 0 {
		return
	}
	k := x.kids.Load()
	r := k.find(nil, 0, root, blocks[0])
	switch {
	case r == nil:
		return
	case x.slower.Load():
		matchTiers(k, r, blocks, m)
		return
	case len(m.of.target) <= 64:
		m.matchWord(k, r, blocks)
	default:
		m.matchWords(k, r, blocks)
	}
	for t := Host; t < Tiers; t++ {
		copy(m.Depth[t], m.Depth[Device])
	}
}

// matchWord is Match for 64 columns of targets that hold blocks on the device alone.
func (m *Match) matchWord(k *kids, r *run, blocks []uint64) {
	live := m.of.valid.word
	last := live
	pos := 0
	for {
		v := r.view.Load()
		rest := blocks[pos:]
		n := approx.Common(v.hashes, rest)
		from := 0
		for i := range v.device {
			s := &v.device[i]
			if s.word != last {
				m.lose(Device, 0, live&^s.word, pos+from)
				if live &= s.word; live == 0 {
					return
				}
				last = s.word
			}
			if from = int(s.end); from >= n {
				break
			}
		}
		if from < n { // nobody holds the next block
			pos += from
			break
		}
		pos += n
		if n == len(rest) {
			break
		}
		if r = k.find(r, int32(n), r.root, blocks[pos]); r == nil {
			break
		}
	}
	m.lose(Device, 0, live, pos)
}

// lose writes the depth of columns of a word that hold no more.
func (m *Match) lose(t Tier, word int, gone uint64, at int) {
	if gone == 0 || at == 0 {
		return
	}
	depth, target := m.Depth[t], m.of.target[word*64:]
	for ; gone != 0; gone &= gone - 1 {
		depth[target[bits.TrailingZeros64(gone)]] = int32(at)
	}
}

// begin makes all columns of targets live.
func (m *Match) begin(t Tier) {
	words := (len(m.of.target) + 63) / 64
	if cap(m.live[t]) < words {
		m.live[t] = make([]uint64, words)
	}
	m.live[t] = m.live[t][:words]
	for w := range m.live[t] {
		m.live[t][w] = m.of.valid.at(w)
	}
	m.last[t] = set{}
}

// cut takes columns that are not in the set out of the live ones. It reports whether any is
// left.
func (m *Match) cut(t Tier, s set, at int) bool {
	if s == m.last[t] && !s.isZero() {
		return true
	}
	m.last[t] = s
	any := uint64(0)
	for w, live := range m.live[t] {
		if live != 0 {
			now := s.at(w)
			m.lose(t, w, live&^now, at)
			m.live[t][w] = live & now
			any |= live & now
		}
	}
	return any != 0
}

func (m *Match) finish(t Tier, at int) {
	for w, gone := range m.live[t] {
		m.lose(t, w, gone, at)
	}
}

// matchWords is Match for any number of targets that hold blocks on the device alone.
func (m *Match) matchWords(k *kids, r *run, blocks []uint64) {
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
				return
			}
			if from = int(s.end); from >= n {
				break
			}
		}
		if from < n {
			pos += from
			break
		}
		pos += n
		if n == len(rest) {
			break
		}
		r = k.find(r, int32(n), r.root, blocks[pos])
	}
	m.finish(Device, pos)
}

// matchTiers is Match for targets that hold blocks in several tiers. It goes through the
// segments of all tiers at once. In each tier, the live columns are those that hold all
// blocks so far there or in a faster tier.
func matchTiers(k *kids, r *run, blocks []uint64, m *Match) {
	for t := range Tier(Tiers) {
		m.begin(t)
	}
	pos := 0
	for r != nil {
		v := r.view.Load()
		rest := blocks[pos:]
		n := approx.Common(v.hashes, rest)
		if !m.matchRun(v, n, pos) {
			return
		}
		pos += n
		if n == len(rest) {
			break
		}
		r = k.find(r, int32(n), r.root, blocks[pos])
	}
	for t := range Tier(Tiers) {
		m.finish(t, pos)
	}
}

// matchRun goes through the first n blocks of a run, at a position in the chain. It reports
// whether any column is still live.
func (m *Match) matchRun(v *view, n, pos int) bool {
	var next [Tiers]int // segments
	for i := 0; i < n; {
		end := n
		var held [Tiers]set
		for t := range Tier(Tiers) {
			s := v.tier(t)
			for next[t] < len(s) && int(s[next[t]].end) <= i {
				next[t]++
			}
			if k := next[t]; k < len(s) {
				held[t], end = s[k].set, min(end, int(s[k].end))
			}
		}
		if !m.cutTiers(&held, pos+i) {
			return false
		}
		i = end
	}
	return true
}

// cutTiers takes columns without the blocks out of the live ones of each tier. It reports
// whether any is left in the slowest, which has all that the others have.
func (m *Match) cutTiers(held *[Tiers]set, at int) bool {
	if *held == m.last && m.last != [Tiers]set{} {
		return true
	}
	m.last = *held
	shared := held[Shared].overlaps(m.of.valid)
	any := uint64(0)
	for w := range m.live[Device] {
		now := uint64(0)
		for t := range Tier(Tiers) {
			if t == Shared && shared {
				now |= m.of.sharing.at(w)
			} else {
				now |= held[t].at(w)
			}
			live := m.live[t][w]
			m.lose(t, w, live&^now, at)
			m.live[t][w] = live & now
		}
		any |= m.live[Shared][w]
	}
	return any != 0
}
