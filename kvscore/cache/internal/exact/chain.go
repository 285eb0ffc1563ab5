package exact

import "slices"

// Chain returns the root and the content hashes of a chain up to a block with a name, in memory if that has
// room. It returns none if no target holds the block.
func (x *Index) Chain(memory []uint64, name uint64) (root uint64, chain []uint64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	last, b := x.held(name)
	if b == nil {
		return 0, memory[:0]
	}
	n := 0
	for at := last; at != 0; at = x.run(at).up {
		n += at.offset() + 1
	}
	chain = slices.Grow(memory[:0], n)[:n]
	for at := last; at != 0; at = x.run(at).up {
		k := at.offset() + 1
		n -= k
		copy(chain[n:], x.run(at).hashes[:k])
	}
	return x.run(last).root, chain
}

// held returns the block that a name leads to, nil if no target holds it.
func (x *Index) held(name uint64) (place, *block) {
	at := x.names.get(name)
	if at == 0 {
		return 0, nil
	}
	b := x.block(at)
	if x.sets.list[b.set].empty() {
		return at, nil
	}
	return at, b
}
