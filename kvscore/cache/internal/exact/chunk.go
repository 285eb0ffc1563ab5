package exact

import "unsafe"

// A place is a number for a block of the trie: a chunk and an offset in it. It stays the
// same as long as the block is there, however its run is divided, joined or moved.
type place uint64

const (
	offsetBits = 9
	chunkSize  = 1 << offsetBits // blocks in a chunk, and in a run at most
	placeBits  = refBits - 1     // see names
	maxChunks  = 1 << (placeBits - offsetBits)
)

func placeOf(chunk uint32, off int32) place {
	return place(chunk)<<offsetBits | place(off)
}

// place returns the place of the run's block i.
func (r *run) place(i int32) place { return placeOf(r.chunk, int32(r.off)+i) }

// chunk gives numbers to the blocks of a run, and of the runs that it is divided into.
type chunk struct {
	runs []*run // by offset; none in a free chunk
	// aliases counts further names of its places. Until the last is gone, no number is used
	// for another block: an alias may still lead to it.
	aliases int32
	high    int16 // numbers below have been used; 0 in a free chunk
}

const chunkPage = 64

type chunks struct {
	pages []*page
	free  int // no page before this one has a free chunk
	bytes int64
}

type page struct {
	chunks [chunkPage]chunk
	used   int
}

// init takes the first chunk away: a slot of the table must not be 0.
func (c *chunks) init() {
	c.pages = []*page{{used: 1}}
	c.pages[0].chunks[0].high = 1
	c.bytes = int64(unsafe.Sizeof(page{})) + 8
}

// at returns the run and the index of a place, nil if nothing is there.
func (c *chunks) at(p place) (*run, int32) {
	n, off := int(p>>offsetBits), int32(p&(chunkSize-1))
	if n/chunkPage >= len(c.pages) || c.pages[n/chunkPage] == nil {
		return nil, 0
	}
	runs := c.pages[n/chunkPage].chunks[n%chunkPage].runs
	low, high := 0, len(runs)
	for high-low > 1 {
		if mid := (low + high) / 2; int32(runs[mid].off) <= off {
			low = mid
		} else {
			high = mid
		}
	}
	if low == high {
		return nil, 0
	}
	r := runs[low]
	if i := off - int32(r.off); i >= 0 && int(i) < len(r.names) {
		return r, i
	}
	return nil, 0
}

func (c *chunks) get(n uint32) *chunk { return &c.pages[n/chunkPage].chunks[n%chunkPage] }

func (k *chunk) idle() bool { return len(k.runs) == 0 && k.aliases == 0 }

// take returns the number of a free chunk, false if there is none.
func (c *chunks) take() (uint32, bool) {
	for c.free < len(c.pages) && c.pages[c.free] != nil && c.pages[c.free].used == chunkPage {
		c.free++
	}
	if c.free*chunkPage >= maxChunks {
		return 0, false
	}
	if c.free == len(c.pages) {
		c.bytes -= int64(cap(c.pages)) * 8
		c.pages = append(c.pages, nil)
		c.bytes += int64(cap(c.pages)) * 8
	}
	p := c.pages[c.free]
	if p == nil {
		p = &page{}
		c.pages[c.free] = p
		c.bytes += int64(unsafe.Sizeof(*p))
	}
	p.used++
	for i := range p.chunks {
		if k := &p.chunks[i]; k.high == 0 {
			k.high = 1
			return uint32(c.free*chunkPage + i), true
		}
	}
	return 0, false // not reached
}

// settle frees a chunk without runs and aliases.
func (c *chunks) settle(n uint32) {
	k := c.get(n)
	if !k.idle() {
		return
	}
	c.bytes -= int64(cap(k.runs)) * 8
	*k = chunk{}
	p := int(n) / chunkPage
	c.free = min(c.free, p)
	c.pages[p].used--
	if c.pages[p].used > 0 {
		return
	}
	c.bytes -= int64(unsafe.Sizeof(page{}))
	c.pages[p] = nil
	last := len(c.pages)
	for last > 0 && c.pages[last-1] == nil {
		last--
	}
	c.pages = c.pages[:last]
	if cap(c.pages) > 64 && last*4 < cap(c.pages) {
		c.bytes -= int64(cap(c.pages)) * 8
		c.pages = append(make([]*page, 0, 2*last), c.pages...)
		c.bytes += int64(cap(c.pages)) * 8
	}
	c.free = min(c.free, last)
}

// enlist adds a run to its chunk.
func (c *chunks) enlist(r *run) {
	k := c.get(r.chunk)
	i := len(k.runs)
	for i > 0 && k.runs[i-1].off > r.off {
		i--
	}
	c.bytes -= int64(cap(k.runs)) * 8
	if k.runs == nil {
		k.runs = make([]*run, 0, 1)
	}
	k.runs = append(k.runs, nil)
	c.bytes += int64(cap(k.runs)) * 8
	copy(k.runs[i+1:], k.runs[i:])
	k.runs[i] = r
}

// strike removes a run from its chunk.
func (c *chunks) strike(r *run) {
	k := c.get(r.chunk)
	i := 0
	for k.runs[i] != r {
		i++
	}
	k.runs = append(k.runs[:i], k.runs[i+1:]...)
	k.runs[:cap(k.runs)][len(k.runs)] = nil
	if len(k.runs)*4 < cap(k.runs) || len(k.runs) == 0 {
		c.bytes -= int64(cap(k.runs)) * 8
		k.runs = append(make([]*run, 0, len(k.runs)), k.runs...)
		c.bytes += int64(cap(k.runs)) * 8
	}
	c.settle(r.chunk)
}
