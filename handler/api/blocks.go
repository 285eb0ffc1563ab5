package api

import "sync"

// The hashes of a long text take an eighth of its length. To collect them as garbage after
// each request would cost more than to compute them.
var longBlocks sync.Pool // of *[]uint64

const pooledBlocks = 256

func newBlocks(n int) []uint64 {
	if n >= pooledBlocks {
		if b, ok := longBlocks.Get().(*[]uint64); ok && cap(*b) >= n {
			return (*b)[:0]
		}
	}
	return make([]uint64, 0, n)
}

// Done frees the memory of a text's Blocks, which must not be used any more.
func (r *Request) Done() {
	if r.Kind == Text && cap(r.Blocks) >= pooledBlocks {
		blocks := r.Blocks
		longBlocks.Put(&blocks)
	}
	r.Blocks, r.rest.blocks = nil, nil
}
