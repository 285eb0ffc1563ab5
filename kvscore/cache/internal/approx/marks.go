package approx

import "math/bits"

// marks are the slots that hold a run, or its beginning, and those of them on which requests in
// flight use it. A pair has 64 slots.
type marks []pair

type pair struct{ held, used uint64 }

// at returns the marks of 64 slots.
func (m marks) at(word int) (p pair) {
	if word < len(m) {
		p = m[word]
	}
	return p
}

// set marks a slot that holds the run.
func (m *marks) set(slot uint16, held, used bool) {
	word, bit := int(slot/64), uint64(1)<<(slot%64)
	for word >= len(*m) {
		*m = append(*m, pair{})
	}
	p := &(*m)[word]
	mark(&p.held, bit, held)
	mark(&p.used, bit, used)
}

func mark(word *uint64, bit uint64, on bool) {
	if *word &^= bit; on {
		*word |= bit
	}
}

// find returns the place of a slot's hold in the run's list, and whether it has one.
func (m marks) find(slot uint16) (at int, ok bool) {
	word, bit := int(slot/64), uint64(1)<<(slot%64)
	for w := range word {
		at += bits.OnesCount64(m.at(w).held)
	}
	p := m.at(word)
	return at + bits.OnesCount64(p.held&(bit-1)), p.held&bit != 0
}
