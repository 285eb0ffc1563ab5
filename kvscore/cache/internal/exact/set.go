package exact

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"unsafe"
)

// mask is a set of targets, which does not change. Its last word is not 0.
type mask []uint64

func (m mask) word(w int) uint64 {
	if w < len(m) {
		return m[w]
	}
	return 0
}

func (m mask) has(target int) bool { return m.word(target/64)>>(target%64)&1 != 0 }

// toggled returns the set with a target added, or without it if it was there, in memory if that has room.
func (m mask) toggled(memory mask, target int) mask {
	to := append(memory[:0], m...)
	for len(to) <= target/64 {
		to = append(to, 0)
	}
	to[target/64] ^= 1 << (target % 64)
	for len(to) > 0 && to[len(to)-1] == 0 {
		to = to[:len(to)-1]
	}
	return to
}

// each calls f with every target.
func (m mask) each(f func(target int)) {
	for w, v := range m {
		for ; v != 0; v &= v - 1 {
			f(w*64 + bits.TrailingZeros64(v))
		}
	}
}

// set is the targets that hold a block, by tier.
type set struct {
	tier [Tiers]mask
	key  string // that leads to it in sets.ids; empty if none does
	refs int    // blocks that have it
}

func (s *set) empty() bool {
	return len(s.tier[Device])+len(s.tier[Host])+len(s.tier[Disk])+len(s.tier[Shared]) == 0
}

func (s *set) has(target int) bool {
	return slices.ContainsFunc(s.tier[:], func(m mask) bool { return m.has(target) })
}

// sets are the sets of holders. Blocks with the same holders share one.
type sets struct {
	list  []set // by id; 0 is the empty set
	free  []uint32
	ids   map[string]uint32
	bytes int64
	key   []byte // scratch space, as mask
	mask  mask
}

func (s *sets) reset() {
	*s = sets{list: make([]set, 1), ids: make(map[string]uint32)}
	s.ids[string(s.keyOf(&s.list[0].tier))] = 0
}

// mapBytes is what a set takes in ids.
const mapBytes = 48

// size returns the memory of a set beside its place in the list. Sets may share masks, which count
// for each.
func (s *set) size() (n int64) {
	for _, m := range s.tier {
		n += 8 * int64(cap(m))
	}
	return n + int64(len(s.key)) + mapBytes
}

func (s *sets) keyOf(tier *[Tiers]mask) []byte {
	s.key = s.key[:0]
	for _, m := range tier {
		s.key = append(s.key, byte(len(m)))
		for _, w := range m {
			s.key = binary.LittleEndian.AppendUint64(s.key, w)
		}
	}
	return s.key
}

// id returns the set with these holders.
func (s *sets) id(tier [Tiers]mask) uint32 {
	key := s.keyOf(&tier)
	id, ok := s.ids[string(key)]
	if ok {
		return id
	}
	if last := len(s.free) - 1; last >= 0 {
		id, s.free = s.free[last], s.free[:last]
	} else {
		id = uint32(len(s.list)) //nolint:gosec // there are fewer sets than blocks
		s.list = append(s.list, set{})
		s.bytes += int64(unsafe.Sizeof(set{})) + 4
	}
	n := &s.list[id]
	*n = set{tier: tier, key: string(key)}
	s.ids[n.key] = id
	s.bytes += n.size()
	return id
}

// toggled returns the set that another one is after a target was added to a tier, or taken out.
func (s *sets) toggled(from uint32, t Tier, target int) uint32 {
	tier := s.list[from].tier
	s.mask = tier[t].toggled(s.mask, target)
	tier[t] = s.mask
	if id, ok := s.ids[string(s.keyOf(&tier))]; ok {
		return id
	}
	tier[t] = slices.Clone(s.mask)
	return s.id(tier)
}

// assign gives a block a set.
func (s *sets) assign(b *block, to uint32) {
	from := b.set
	s.list[to].refs++
	b.set = to
	if from == 0 {
		return
	}
	if f := &s.list[from]; f.refs > 1 {
		f.refs--
	} else {
		delete(s.ids, f.key)
		s.bytes -= f.size()
		*f = set{}
		s.free = append(s.free, from)
	}
}

// drop takes a target out of all sets. Sets may be equal afterwards.
func (s *sets) drop(target int) {
	for id := range s.list {
		f := &s.list[id]
		if !f.has(target) {
			continue
		}
		s.bytes -= f.size()
		delete(s.ids, f.key)
		for t, m := range f.tier {
			if m.has(target) {
				f.tier[t] = m.toggled(nil, target)
			}
		}
		f.key = ""
		if key := s.keyOf(&f.tier); !s.known(key) {
			f.key = string(key)
			s.ids[f.key] = uint32(id) //nolint:gosec // see id
		}
		s.bytes += f.size()
	}
}

func (s *sets) known(key []byte) bool {
	_, ok := s.ids[string(key)]
	return ok
}
