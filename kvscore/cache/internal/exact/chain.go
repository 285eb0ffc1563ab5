package exact

// Place returns how many blocks a chain has up to a block with a name, and its root. n is 0 if no
// target holds the block.
func (x *Index) Place(name uint64) (n int, root uint64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	at, b := x.held(name)
	if b == nil {
		return 0, 0
	}
	root = x.run(at).root
	for ; at != 0; at = x.run(at).up {
		n += at.offset() + 1
	}
	return n, root
}

// Chain returns the content hashes of a chain up to a block with a name; nil if no target holds it.
func (x *Index) Chain(name uint64) []uint64 {
	n, _ := x.Place(name)
	chain := make([]uint64, n)
	x.mu.RLock()
	defer x.mu.RUnlock()
	at, b := x.held(name)
	for at != 0 && b != nil {
		r := x.run(at)
		for i := at.offset(); i >= 0; i-- {
			if n--; n < 0 {
				return nil // it has changed meanwhile
			}
			chain[n] = r.blocks[i].hash
		}
		at = r.up
	}
	if n > 0 {
		return nil
	}
	return chain
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
