package exact

// Stored is an event: a target's engine has stored consecutive blocks of a chain in a tier.
type Stored struct {
	Target int
	Tier   Tier
	// Root stands for what must be equal for two prompts to share blocks: adapter, salt and
	// block size. It does not include the model, because a target serves only one. It is
	// required without a parent. With a parent, 0 means that the event does not show it, and
	// any other value must be the root of the parent's chain. Store sets it.
	Root uint64
	// Parent is the engine's name of the block before the first, if HasParent.
	Parent    uint64
	HasParent bool
	// Names are the engine's names of the blocks, in order.
	Names []uint64
	// Blocks are the content hashes, as many. If nil, the index must know the blocks by these names
	// from another tier or target.
	Blocks []uint64
	// Session is the session that the event names; empty is unknown. The index does not use it.
	Session []byte
}

// Outcome says whether the index recorded all of an event.
type Outcome uint8

const (
	// OK: the index recorded all blocks.
	OK Outcome = iota
	// UnknownParent: no target holds a block with the parent's name, or only others do and its
	// root is not that of the event.
	UnknownParent
	// UnknownName: an event without content has a name that leads to no held block. The index
	// recorded the other blocks.
	UnknownName
	// Contradiction: a name leads to another block that the target holds, or the root is not
	// that of the parent. The index recorded the blocks before.
	Contradiction
	// NoRoom: the blocks do not fit into the memory.
	NoRoom
)

// Store records what an engine has stored. It returns how many of the blocks the target now
// holds, and whether that is all of them. A refused event marks the target as incomplete.
//
// A block that the target holds already counts once more: the engine must remove it as often.
// Only an event without a parent and with several blocks, all held, is a repeated
// announcement, and does not count. The index cannot tell whether an incomplete target holds
// all. It therefore counts nothing in its events without a parent. The shared tier has no counts.
func (x *Index) Store(s *Stored) (int, Outcome) {
	if len(s.Names) == 0 {
		return 0, OK
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	before, owner := x.size(), x.owner(s.Target)
	n, o := x.store(s, owner)
	if o != OK {
		owner.incomplete = true
		owner.ambiguous = owner.ambiguous || o == Contradiction
	}
	x.relieve(before)
	return n, o
}

func (x *Index) store(s *Stored, owner *owner) (n int, o Outcome) {
	if int64(len(s.Names))*blockBytes > x.bound {
		return 0, NoRoom
	}
	x.slower = x.slower || s.Tier != Device
	x.repeated = x.repeated[:0]
	if s.Blocks == nil {
		n, o = x.storeKnown(s, owner)
	} else {
		n, o = x.storeChain(s, owner)
	}
	if x.repeats(s, owner, o) {
		x.countRepeats(s, owner)
	}
	if s.Tier == Shared && n > 0 && !x.sharing.has(s.Target) {
		x.sharing = x.sharing.toggled(nil, s.Target)
	}
	return n, o
}

// repeats reports whether the event has blocks that the target has stored once more.
func (x *Index) repeats(s *Stored, owner *owner, o Outcome) bool {
	if len(x.repeated) == 0 || s.Tier == Shared {
		return false
	}
	if s.HasParent {
		return true
	}
	all := len(x.repeated) == len(s.Names)
	return !owner.incomplete && (len(s.Names) == 1 || !all && o == OK)
}

func (x *Index) countRepeats(s *Stored, owner *owner) {
	if owner.repeats == nil {
		owner.repeats = make(map[repeat]int32)
	}
	before := len(owner.repeats)
	for _, at := range x.repeated {
		owner.repeats[repeat{at, s.Tier}]++
	}
	x.bytes.repeats += int64(len(owner.repeats)-before) * repeatBytes
}

// storeKnown records blocks by their names alone.
func (x *Index) storeKnown(s *Stored, owner *owner) (n int, o Outcome) {
	for _, name := range s.Names {
		at, b := x.known(name)
		if b == nil || owner.ambiguous && !x.sets.list[b.set].has(s.Target) {
			o = UnknownName
			continue
		}
		x.addHolder(s, owner, at)
		n++
	}
	return n, o
}

// storeChain records blocks with their content.
func (x *Index) storeChain(s *Stored, owner *owner) (n int, o Outcome) {
	at, root, o := x.locate(s, owner)
	s.Root = root
	for o == OK && n < len(s.Names) {
		at = x.next(at, root, s.Blocks[n:])
		if o = x.nameBlock(s.Names[n], at); o != OK {
			x.trim(at) // it may be new
			break
		}
		x.addHolder(s, owner, at)
		n++
	}
	return n, o
}

// locate returns the block that the event's blocks follow, 0 if they are at the top, and their root.
// After a contradiction, it trusts the target's names only where the target itself holds the parent.
func (x *Index) locate(s *Stored, owner *owner) (place, uint64, Outcome) {
	if !s.HasParent {
		return 0, s.Root, OK
	}
	at, b := x.known(s.Parent)
	if b == nil {
		return 0, 0, UnknownParent
	}
	root := x.run(at).root
	other := s.Root != 0 && root != s.Root
	switch {
	case (owner.ambiguous || other) && !x.sets.list[b.set].has(s.Target):
		return 0, 0, UnknownParent
	case other, s.Root == 0 && owner.ambiguous:
		return 0, 0, Contradiction
	}
	return at, root, OK
}

// next returns the block that continues a chain, as the first of some. It adds the block if need be.
func (x *Index) next(after place, root uint64, blocks []uint64) place {
	if after == 0 {
		return x.startRun(start{root, 0, blocks[0]}, len(blocks))
	}
	r, i := x.run(after), after.offset()
	switch {
	case i+1 < len(r.blocks) && r.hashes[i+1] == blocks[0]:
		return after + 1
	case i+1 == len(r.blocks) && i+1 < runSize && r.blocks[i].kids == 0:
		x.bytes.blocks -= r.bytes()
		r.blocks, r.hashes = append(r.blocks, block{}), append(r.hashes, blocks[0])
		x.bytes.blocks += r.bytes()
		return after + 1
	}
	return x.startRun(start{root, after, blocks[0]}, len(blocks))
}

// startRun returns the first block of a run, which it adds if need be, with room for more blocks.
func (x *Index) startRun(s start, room int) place {
	if r := x.starts[s]; r != nil {
		return r.at(0)
	}
	id := uint32(len(x.runs)) //nolint:gosec // the memory has room for fewer
	if last := len(x.free) - 1; last >= 0 {
		id, x.free = x.free[last], x.free[:last]
	} else {
		x.runs = append(x.runs, nil)
	}
	room = min(room, runSize)
	r := &run{id: id, root: s.root, up: s.up, blocks: make([]block, 1, room), hashes: append(make([]uint64, 0, room), s.hash)}
	x.bytes.blocks += r.bytes()
	x.runs[id], x.starts[s] = r, r
	x.most = max(x.most, len(x.starts))
	if s.up != 0 {
		x.block(s.up).kids++
	}
	return r.at(0)
}

// addHolder records that the target holds a block, which has a name.
func (x *Index) addHolder(s *Stored, owner *owner, at place) {
	r := x.run(at)
	r.hot = true
	b := &r.blocks[at.offset()]
	if x.sets.list[b.set].tier[s.Tier].has(s.Target) {
		x.repeated = append(x.repeated, at)
		return
	}
	x.sets.assign(b, x.sets.toggled(b.set, s.Tier, s.Target))
	owner.blocks[s.Tier]++
}
