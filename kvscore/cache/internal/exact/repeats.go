package exact

// repeats counts blocks that a target has stored more than once: vLLM reports each physical
// block, and later as many removals. It is an open-addressing hash table. A slot has a key
// (place and tier) in the low bits and a count above, 0 in a free one.
type repeats struct {
	slots []uint64
	count int
}

const (
	repeatKeyBits = placeBits + 2
	repeatKeyMask = 1<<repeatKeyBits - 1
	// maxRepeats is where counting stops. The index then forgets the block too early.
	maxRepeats = 1<<16 - 1
)

func repeatKey(p place, t Tier) uint64 { return uint64(p)<<2 | uint64(t) }

func (r *repeats) home(key uint64) int {
	return int((key * 0x9e3779b97f4a7c15) >> 32 & uint64(len(r.slots)-1))
}

func (r *repeats) find(key uint64) int {
	for i := r.home(key); r.slots[i] != 0; i = (i + 1) & (len(r.slots) - 1) {
		if r.slots[i]&repeatKeyMask == key {
			return i
		}
	}
	return -1
}

func (r *repeats) bytes() int64 { return int64(len(r.slots)) * 8 }

// add counts one more.
func (r *repeats) add(key uint64) {
	if len(r.slots) > 0 {
		if i := r.find(key); i >= 0 {
			if r.slots[i]>>repeatKeyBits < maxRepeats {
				r.slots[i] += 1 << repeatKeyBits
			}
			return
		}
	}
	if (r.count+1)*4 > len(r.slots)*3 {
		r.resize(max(16, 2*len(r.slots)))
	}
	r.put(1<<repeatKeyBits | key)
	r.count++
}

func (r *repeats) put(slot uint64) {
	i := r.home(slot & repeatKeyMask)
	for r.slots[i] != 0 {
		i = (i + 1) & (len(r.slots) - 1)
	}
	r.slots[i] = slot
}

func (r *repeats) resize(n int) {
	old := r.slots
	r.slots = nil
	if n > 0 {
		r.slots = make([]uint64, n)
	}
	for _, s := range old {
		if s != 0 {
			r.put(s)
		}
	}
}

// take counts one less, and reports whether there was one.
func (r *repeats) take(key uint64) bool {
	if r.count == 0 {
		return false
	}
	i := r.find(key)
	if i < 0 {
		return false
	}
	if r.slots[i]>>repeatKeyBits > 1 {
		r.slots[i] -= 1 << repeatKeyBits
	} else {
		r.drop(i)
	}
	return true
}

// forget drops all counts of a block.
func (r *repeats) forget(key uint64) {
	if r.count == 0 {
		return
	}
	if i := r.find(key); i >= 0 {
		r.drop(i)
	}
}

func (r *repeats) drop(gap int) {
	mask := len(r.slots) - 1
	for i := (gap + 1) & mask; r.slots[i] != 0; i = (i + 1) & mask {
		if home := r.home(r.slots[i] & repeatKeyMask); (i-home)&mask >= (i-gap)&mask {
			r.slots[gap] = r.slots[i]
			gap = i
		}
	}
	r.slots[gap] = 0
	r.count--
	switch {
	case r.count == 0:
		r.resize(0)
	case len(r.slots) > 16 && r.count*8 < len(r.slots):
		r.resize(len(r.slots) / 2)
	}
}
