package exact

import "github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"

// matchTiers is Match for targets that hold blocks in several tiers. It goes through the
// segments of all tiers at once. In each tier, the live targets are those that hold all
// blocks so far there or in a faster tier.
func (x *Index) matchTiers(r *run, blocks []uint64, m *Match) {
	for t := range Tier(Tiers) {
		m.begin(t)
	}
	pos := 0
	for r != nil {
		v := r.view.Load()
		rest := blocks[pos:]
		n := approx.Common(v.hashes, rest)
		if !x.matchRun(v, n, pos, m) {
			return
		}
		pos += n
		if n < len(v.hashes) || n == len(rest) || v.kids == nil {
			break
		}
		block := blocks[pos]
		r = v.kids.find(keyOf(block), r.root, block)
	}
	for t := range Tier(Tiers) {
		m.finish(t, pos)
	}
}

// matchRun goes through the first n blocks of a run, at a position in the chain. It reports
// whether any target is still live.
func (x *Index) matchRun(v *view, n, pos int, m *Match) bool {
	var next [Tiers]int // segments
	for i := 0; i < n; {
		end := n
		var held [Tiers]*set
		for t := range Tier(Tiers) {
			s := v.tier(t)
			for next[t] < len(s) && int(s[next[t]].end) <= i {
				next[t]++
			}
			if k := next[t]; k < len(s) {
				held[t], end = s[k].set, min(end, int(s[k].end))
			}
		}
		if !x.cutTiers(m, &held, pos+i) {
			return false
		}
		i = end
	}
	return true
}

// cutTiers takes targets without the blocks out of the live ones of each tier. It reports
// whether any is left in the slowest, which has all that the others have.
func (x *Index) cutTiers(m *Match, held *[Tiers]*set, at int) bool {
	if *held == m.last && m.last != [Tiers]*set{} {
		return true
	}
	m.last = *held
	shared := !held[Shared].none()
	any := uint64(0)
	for w := range m.live[Device] {
		now := uint64(0)
		for t := range Tier(Tiers) {
			if t == Shared && shared {
				now |= x.sharing[w].Load()
			} else if held[t] != nil {
				now |= held[t].at(w)
			}
			live := m.live[t][w]
			lose(m.Depth[t], w*64, live&^now, at)
			m.live[t][w] = live & now
		}
		any |= m.live[Shared][w]
	}
	return any != 0
}

// none reports whether no target is in the set, for readers.
func (s *set) none() bool {
	if s == nil {
		return true
	}
	for w := range 1 + len(s.more) {
		if s.at(w) != 0 {
			return false
		}
	}
	return true
}
