package approx

import (
	"math"
	"slices"
)

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
	path   []uint32 // scratch
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
	id      uint32
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
		w.slots[i] = passed{at: w.until, done: !x.slots[i].declared}
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
	id := p.resume(x, slot)
	for range slotVisits {
		if id == 0 {
			p.done = true
			return true
		}
		h := x.holds.at(id)
		*left--
		if h.touched <= w.from {
			p.done = true
			return true
		}
		if h.touched <= p.at {
			if h.confirmed && !w.continues(x, h) && !w.copy(x, slot, h, b, left) {
				return false
			}
			p.at = h.touched
			p.last[p.n%len(p.last)] = passedHold{h.touched, id}
			p.n++
		}
		id = h.older
	}
	return true
}

// resume returns the next hold of the slot, 0 at the end. If all of the last ones have moved,
// the walk begins again and skips what it has read.
func (p *passed) resume(x *Index, slot int) uint32 {
	s := &x.slots[slot]
	if s.cleared {
		return 0
	}
	for k := 1; k <= min(p.n, len(p.last)); k++ {
		last := p.last[(p.n-k)%len(p.last)]
		if n := last.id / page; int(n) >= len(x.holds.pages) || x.holds.pages[n] == nil {
			continue
		}
		if h := x.holds.at(last.id); h.live() && h.touched == last.touched && int(h.slot) == slot && !h.parked {
			return h.older
		}
	}
	return s.lru.front
}

// continues reports whether the hold's next run follows it in the order. Then that run's chain
// shows the hold, too.
func (w *Walk) continues(x *Index, h *hold) bool {
	if h.older == 0 || int(h.n) < len(x.runs.at(h.run).hashes) {
		return false
	}
	next := x.holds.at(h.older)
	return next.touched > w.from && x.runs.at(next.run).parent == h.run
}

// copy copies a chain into the batch. It returns false if there is no room.
func (w *Walk) copy(x *Index, slot int, h *hold, b *Batch, left *int) bool {
	length := min(int(x.runs.at(h.run).start+h.n), MaxHeld)
	if len(b.blocks)+length > cap(b.blocks) {
		return false
	}
	w.path = w.path[:0]
	for id := h.run; id != 0; id = x.runs.at(id).parent {
		w.path = append(w.path, id)
		*left--
	}
	for i := len(w.path) - 1; i >= max(0, len(w.path)-maxRuns) && length > 0; i-- {
		r := x.runs.at(w.path[i])
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
	b.Chains = append(b.Chains, Held{Slot: slot, Root: x.runs.at(h.run).root})
	b.ends = append(b.ends, [2]int{len(b.blocks), len(b.parts)})
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
// room. It ignores Held.Slot. It returns false if the slot takes no more: it is full, was
// not declared or is being cleared, or the memory is full.
func (x *Index) Restore(slot int, c *Held) bool {
	s := x.open(slot)
	if s == nil || s.capacity > 0 && s.used >= s.capacity || x.Bytes() > x.memory-x.memory/64 {
		return false
	}
	x.left = 0 // it evicts nothing
	deepest, pos := x.follow(s, uint16(slot), c)
	if pos >= 0 {
		deepest = x.extend(s, uint16(slot), c, deepest, pos)
	}
	x.age(s, uint16(slot), deepest)
	x.settle(s)
	return true
}

// follow pins the part of the chain that the index knows. It returns the deepest run, and
// where the unknown part begins; -1 if there is no room for it.
func (x *Index) follow(s *slot, slot uint16, c *Held) (parent uint32, pos int) {
	var alike Weights
	for depth := 0; pos < len(c.Blocks); depth++ {
		id := x.child(parent, x.seedOf(parent), c.Root, c.Blocks[pos])
		if id == 0 {
			return parent, pos
		}
		r := x.runs.at(id)
		want := x.affordable(s, id, slot, Common(r.hashes, c.Blocks[pos:]))
		if want == 0 || depth >= maxRuns {
			return parent, -1
		}
		if ok, _ := x.room(x.pinDemand(id, slot, want)); !ok {
			return parent, -1
		}
		if want < len(r.hashes) {
			id = x.split(id, want, &alike)
		}
		x.pin(s, id, slot)
		parent, pos = id, pos+want
	}
	return parent, -1
}

// extend adds the rest of the chain from pos on below parent, and returns the deepest run.
func (x *Index) extend(s *slot, slot uint16, c *Held, parent uint32, pos int) uint32 {
	end := 0
	for i := range c.Parts {
		part := &c.Parts[i]
		if end += part.Blocks; end <= pos {
			continue
		}
		id := x.grow(s, slot, parent, c.Root, c.Blocks[pos:end], pos, clampWeight(int64(part.Weight)))
		if id == 0 {
			return parent
		}
		r := x.runs.at(id)
		parent, pos = id, pos+len(r.hashes)
		if pos < end {
			return parent
		}
		r.arrivals, r.count, r.past, r.weighed = part.Arrivals, max(part.Count, 0), part.Past, part.Weighed
	}
	return parent
}

// age unpins the runs from the deepest up. New holds become the oldest of the slot, with the
// head more recent than the tail.
func (x *Index) age(s *slot, slot uint16, deepest uint32) {
	var added []uint32
	for id := deepest; id != 0; id = x.runs.at(id).parent {
		r := x.runs.at(id)
		hid, h := x.holdOf(r, slot)
		if h.refs--; h.refs == 0 {
			s.inUse -= int64(h.n) * int64(r.weight)
		}
		if !h.confirmed {
			added = append(added, hid)
		}
	}
	for _, id := range slices.Backward(added) {
		h := x.holds.at(id)
		x.oldest--
		h.touched, h.confirmed = x.oldest, true
		if h.refs > 0 {
			continue // a request in flight uses it
		}
		x.unlink(id, h)
		h.parked = false
		x.pushBack(&s.lru, id)
	}
}

func (x *Index) pushBack(l *list, id uint32) {
	h := x.holds.at(id)
	h.newer, h.older = l.back, 0
	if l.back != 0 {
		x.holds.at(l.back).older = id
	} else {
		l.front = id
	}
	l.back = id
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
