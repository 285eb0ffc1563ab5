package exact

import (
	"sync/atomic"
	"unsafe"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
)

// kids leads from a place in the trie and the next block to the run that begins there. It is an
// open-addressing hash table. Readers search it while the writer adds and removes. A cell never
// gets another key. A removed run leaves a cell without a run. Growth makes a new table, and
// readers that have the old one may finish there.
type kids struct {
	cells []cell
	n     int // runs
	used  int // cells that have a key
}

type cell struct {
	key atomic.Uint64 // 0: never used
	run atomic.Pointer[run]
}

func (k *kids) bytes() int64 { return int64(len(k.cells)) * int64(unsafe.Sizeof(cell{})) }

// keyOf returns the key of a run that continues another after some blocks, or of one at the top.
// Content hashes are uniform.
func keyOf(up *run, after int32, root, block uint64) uint64 {
	if up != nil {
		root = uint64(up.at(0)) + uint64(after) + 1
	}
	return max(approx.Fold(root^0x9e3779b97f4a7c15, 0xd6e8feb86659fd93)^block, 1)
}

func (r *run) key() uint64 { return keyOf(r.up, r.after, r.root, r.first) }

// find returns the run that begins with a block after some blocks of another, or nil.
func (k *kids) find(up *run, after int32, root, block uint64) *run {
	key := keyOf(up, after, root, block)
	mask := uint64(len(k.cells) - 1)
	for i := key & mask; ; i = (i + 1) & mask {
		c := &k.cells[i]
		switch c.key.Load() {
		case 0:
			return nil
		case key:
			if r := c.run.Load(); r != nil && r.up == up && r.after == after && r.first == block && r.root == root {
				return r
			}
		}
	}
}

// add adds a run. There is a cell without a key.
func (k *kids) add(key uint64, r *run) {
	mask := uint64(len(k.cells) - 1)
	i := key & mask
	for {
		was := k.cells[i].key.Load()
		if was == 0 {
			k.cells[i].key.Store(key)
			k.used++
			break
		}
		if was == key && k.cells[i].run.Load() == nil {
			break
		}
		i = (i + 1) & mask
	}
	k.cells[i].run.Store(r)
	k.n++
}

func (k *kids) remove(key uint64, r *run) {
	mask := uint64(len(k.cells) - 1)
	i := key & mask
	for k.cells[i].run.Load() != r {
		i = (i + 1) & mask
	}
	k.cells[i].run.Store(nil)
	k.n--
}

const fewCells = 64

// attach shows readers a new run.
func (x *Index) attach(r *run) {
	k := x.kids.Load()
	if (k.used+1)*4 > len(k.cells)*3 {
		k = x.rebuild(k)
	}
	k.add(r.key(), r)
	if up := r.up; up != nil {
		r.place = int32(len(up.kids))
		up.kids = append(up.kids, r)
	}
}

// thin makes a smaller table if most cells are empty.
func (x *Index) thin() {
	if k := x.kids.Load(); len(k.cells) > fewCells && k.n*8 < len(k.cells) {
		x.rebuild(k)
	}
}

func (x *Index) rebuild(k *kids) *kids {
	size := fewCells
	for size < 2*(k.n+1) {
		size *= 2
	}
	to := &kids{cells: make([]cell, size)}
	for i := range k.cells {
		if r := k.cells[i].run.Load(); r != nil {
			to.add(k.cells[i].key.Load(), r)
		}
	}
	x.kids.Store(to)
	return to
}
