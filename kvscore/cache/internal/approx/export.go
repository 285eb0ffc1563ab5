package approx

import "math"

// MaxHeld is the greatest length of a chain that [Walk] reads, in blocks. It reads only the
// beginning of a longer one.
const MaxHeld = 24 << 10

// Held is a chain that a slot holds, in the form in which it survives the index.
type Held struct {
	Slot   int
	Root   uint64
	Blocks []uint64
	// Parts divide Blocks where chains part or prompts end. Their lengths add up to that
	// of Blocks.
	Parts []Part
}

// Part is consecutive blocks of a chain, with what the index knows of their end.
type Part struct {
	Blocks   int
	Weight   int32 // milli-tokens per block
	Arrivals uint16
	Count    int32 // tokens of a prompt that ended here, as an engine counted them; 0 if none
	Past     uint16
	Weighed  bool
}

// Walk is a pass over the chains of all slots, the most recently used first. The index may
// change between its steps. The walk then reads the chains in use meanwhile at its end, and
// it may miss some or read some twice. The zero value is a new pass.
type Walk struct {
	begun  bool
	second bool   // it reads what was used since its beginning
	from   uint64 // the touched values that it reads are above from
	until  uint64 // and at most until
	slots  []passed
	path   []*run // scratch
}

// passed says how far a walk is in a slot's order.
type passed struct {
	at   uint64 // touched of the last hold
	done bool
	last [8]passedHold // the last holds, in a ring: some may have moved
	n    int
}

type passedHold struct {
	touched uint64
	hold    *hold
}

// Batch is what one step of a [Walk] reads. Reuse it: its slices are kept.
type Batch struct {
	Chains []Held
	blocks []uint64
	parts  []Part
	ends   [][2]int // of each chain in blocks and parts
}

const (
	batchBlocks = 32 << 10 // a copy of 256 KiB
	batchVisits = 512
	slotVisits  = 64 // of one slot, before the walk goes on with the next
)

// Next reads the next chains. It takes about 0.1 ms. It returns false at the end. It needs
// the read lock.
func (w *Walk) Next(x *Index, b *Batch) (more bool) {
	if b.blocks == nil {
		b.blocks = make([]uint64, 0, batchBlocks)
	}
	b.Chains, b.blocks, b.parts, b.ends = b.Chains[:0], b.blocks[:0], b.parts[:0], b.ends[:0]
	if !w.begun {
		w.begun = true
		w.pass(0, x)
	}
	for left := batchVisits; left > 0; {
		slot := w.next()
		if slot < 0 {
			if w.second {
				b.finish()
				return false
			}
			w.second = true
			w.pass(w.until, x)
			continue
		}
		if !w.read(x, slot, b, &left) {
			break
		}
	}
	b.finish()
	return true
}

// Hurry makes the walk pass over what it has not read, except for what was used since it
// began.
func (w *Walk) Hurry() {
	for i := range w.slots {
		w.slots[i].done = true
	}
}

// pass begins with what was used after from.
func (w *Walk) pass(from uint64, x *Index) {
	w.from, w.until = from, x.clock
	w.slots = make([]passed, len(x.slots))
	for i := range w.slots {
		w.slots[i] = passed{at: w.until, done: x.slots[i] == nil}
	}
}

// next returns the slot to read, -1 if all are read: that whose next chains were probably
// used last.
func (w *Walk) next() int {
	best := -1
	for i := range w.slots {
		if p := &w.slots[i]; !p.done && (best < 0 || p.at > w.slots[best].at) {
			best = i
		}
	}
	return best
}

// read reads a few holds of a slot. It returns false if the batch is full.
func (w *Walk) read(x *Index, slot int, b *Batch, left *int) bool {
	p := &w.slots[slot]
	h := p.resume(x.slots[slot])
	for h != nil && h.touched > p.at { // read before; they must not use up the visits
		h = h.older
		*left--
	}
	for range slotVisits {
		*left--
		if h == nil || h.touched <= w.from {
			p.done = true
			return true
		}
		if h.touched <= p.at {
			if h.confirmed && !x.slots[slot].hasLost(h) && !w.continues(h) && !w.copy(slot, h, b, left) {
				return false
			}
			p.at = h.touched
			p.last[p.n%len(p.last)] = passedHold{h.touched, h}
			p.n++
		}
		h = h.older
	}
	return true
}

// resume returns the next hold of the slot, nil at the end. If all of the last ones have moved,
// the walk begins again and skips what it has read.
func (p *passed) resume(s *slot) *hold {
	for k := 1; k <= min(p.n, len(p.last)); k++ {
		last := p.last[(p.n-k)%len(p.last)]
		if h := last.hold; h.run != nil && h.touched == last.touched {
			return h.older
		}
	}
	return s.front
}

// continues reports whether the hold's next run follows it in the order. Then that run's chain
// shows the hold, too.
func (w *Walk) continues(h *hold) bool {
	if h.older == nil || int(h.n) < len(h.run.hashes) {
		return false
	}
	return h.older.touched > w.from && h.older.run.up == h.run
}

// copy copies a chain into the batch. It returns false if there is no room.
func (w *Walk) copy(slot int, h *hold, b *Batch, left *int) bool {
	length := min(int(h.run.start+h.n), MaxHeld)
	if len(b.blocks)+length > cap(b.blocks) {
		return false
	}
	w.path = w.path[:0]
	for r := h.run; r != nil; r = r.up {
		w.path = append(w.path, r)
		*left--
	}
	for i := len(w.path) - 1; i >= max(0, len(w.path)-maxRuns) && length > 0; i-- {
		r := w.path[i]
		n := len(r.hashes)
		if i == 0 {
			n = int(h.n)
		}
		part := Part{Blocks: min(n, length), Weight: r.weight, Weighed: r.weighed}
		if part.Blocks == len(r.hashes) {
			part.Arrivals, part.Count, part.Past = r.arrivals, r.count, r.past
		}
		b.blocks = append(b.blocks, r.hashes[:part.Blocks]...)
		b.parts = append(b.parts, part)
		length -= part.Blocks
	}
	b.Chains = append(b.Chains, Held{Slot: slot, Root: h.run.root})
	b.ends = append(b.ends, [2]int{len(b.blocks), len(b.parts)})
	clear(w.path)
	return true
}

// finish gives the chains their blocks and parts.
func (b *Batch) finish() {
	var from [2]int
	for i, end := range b.ends {
		b.Chains[i].Blocks, b.Chains[i].Parts = b.blocks[from[0]:end[0]], b.parts[from[1]:end[1]]
		from = end
	}
}

// Restore records that the slot's engine has had the chain since before all that the slot
// holds. It evicts nothing for it, and keeps the beginning of a chain for which there is no
// room. It ignores Held.Slot. It returns false if the slot takes no more: it is full or was
// not declared, or the memory is full.
func (x *Index) Restore(slot int, c *Held) bool {
	s := x.slot(slot)
	if s == nil || s.clearing || s.capacity > 0 && s.used.Load() >= s.capacity || x.bytes > x.memory-x.memory/64 {
		return false
	}
	var up *run
	pos, end := 0, 0
	for i := 0; i < len(c.Parts) && pos >= end; i++ {
		part := &c.Parts[i]
		end += part.Blocks
		for depth := 0; pos < end && depth < maxRuns; depth++ {
			r := x.child(up, c.Root, c.Blocks[pos])
			if r == nil {
				if r = x.growOld(s, up, c, pos, end, part); r == nil {
					return true
				}
			} else if r = x.followOld(s, uint16(slot), r, c.Blocks[pos:]); r == nil {
				return true
			}
			if h := r.hold(uint16(slot)); h == nil {
				x.age(s, x.add(s, uint16(slot), r))
			} else if !h.confirmed { // a request in flight uses it
				h.confirmed = true
			}
			up, pos = r, pos+len(r.hashes)
		}
	}
	return true
}

// followOld returns a run that is the beginning of the blocks, and that the slot holds or has
// room for; nil if there is none.
func (x *Index) followOld(s *slot, slot uint16, r *run, blocks []uint64) *run {
	var alike Weights
	n := Common(r.hashes, blocks)
	if h := r.hold(slot); h != nil && h.lost {
		return nil
	} else if h != nil {
		n = min(n, int(h.n))
	} else {
		n = s.fits(n, r.weight)
	}
	if n == 0 || x.bytes+runBytes+int64(len(r.holds)+1)*holdBytes > x.limit {
		return nil
	}
	if n < len(r.hashes) {
		return x.split(r, n, &alike)
	}
	return r
}

// growOld adds a run with the chain's blocks from a position up to the end of a part. It adds
// fewer if the slot or the memory has less room.
func (x *Index) growOld(s *slot, up *run, c *Held, pos, end int, part *Part) *run {
	weight := clampWeight(int64(part.Weight))
	n := s.fits(end-pos, weight)
	if n == 0 || x.bytes+runBytes+holdBytes+hashBytes(n) > x.limit {
		return nil
	}
	r := x.grow(s, up, c.Root, c.Blocks[pos:pos+n], pos, weight)
	if r != nil && pos+n == end {
		r.arrivals, r.count, r.past, r.weighed = part.Arrivals, max(part.Count, 0), part.Past, part.Weighed
	}
	return r
}

// fits returns how many of the blocks of a weight the slot has room for without eviction.
func (s *slot) fits(blocks int, weight int32) int {
	if s.capacity == 0 || weight == 0 {
		return blocks
	}
	return int(min(int64(blocks), max(0, s.capacity-s.used.Load())/int64(weight)))
}

// age makes a new hold the oldest of the slot.
func (x *Index) age(s *slot, h *hold) {
	x.oldest--
	h.touched, h.confirmed = x.oldest, true
	h.newer, h.older = s.back, nil
	if s.back != nil {
		s.back.older = h
	} else {
		s.front = h
	}
	s.back = h
}

// Valid reports whether Restore can use the chain: the parts add up to the blocks.
func (c *Held) Valid() bool {
	n := 0
	for i := range c.Parts {
		p := &c.Parts[i]
		if p.Blocks <= 0 || p.Weight < 0 || p.Count < 0 || p.Blocks > math.MaxInt32 {
			return false
		}
		n += p.Blocks
	}
	return n == len(c.Blocks) && n > 0 && len(c.Parts) <= maxRuns
}
