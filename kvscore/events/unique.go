package events

import (
	"hash/maphash"
	"math/bits"
	"slices"
)

// unique finds names that occur twice. The zero value is ready for use.
type unique struct {
	slots  []slot // a hash table without chains, at most half full
	round  uint32 // slots of other rounds are free
	factor uint64 // odd and random, so that nobody can choose names that collide
	sorted []uint64
}

type slot struct {
	hash  uint64
	round uint32
}

const (
	fewHashes  = 8       // compared with each other
	mostHashes = 1 << 12 // put into a table; more are sorted
)

// repeats reports whether a hash occurs twice, or is the parent.
func (u *unique) repeats(hashes []uint64, parent uint64, hasParent bool) bool {
	if hasParent && slices.Contains(hashes, parent) {
		return true
	}
	switch n := len(hashes); {
	case n <= fewHashes:
		for i, h := range hashes {
			if slices.Contains(hashes[:i], h) {
				return true
			}
		}
		return false
	case n > mostHashes:
		return u.repeatsSorted(hashes)
	}
	return u.repeatsTable(hashes)
}

func (u *unique) repeatsTable(hashes []uint64) bool {
	if size := 2 << bits.Len(uint(len(hashes)-1)); len(u.slots) < size {
		*u = unique{slots: make([]slot, size), factor: maphash.String(maphash.MakeSeed(), "") | 1, sorted: u.sorted}
	}
	u.round++
	if u.round == 0 {
		clear(u.slots)
		u.round = 1
	}
	shift, mask := 64-bits.Len(uint(len(u.slots)-1)), len(u.slots)-1
	for _, h := range hashes {
		i := int(h * u.factor >> shift)
		for u.slots[i].round == u.round {
			if u.slots[i].hash == h {
				return true
			}
			i = (i + 1) & mask
		}
		u.slots[i] = slot{h, u.round}
	}
	return false
}

func (u *unique) repeatsSorted(hashes []uint64) bool {
	u.sorted = append(kept(u.sorted, keepHashes), hashes...)
	slices.Sort(u.sorted)
	for i, h := range u.sorted[1:] {
		if h == u.sorted[i] {
			return true
		}
	}
	return false
}
