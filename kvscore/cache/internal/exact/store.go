package exact

import "github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"

// Store records what an engine has stored. It returns how many of the blocks the target now
// holds, and whether that is all of them. A refused event marks the target as incomplete.
//
// A block that the target holds already counts once more: the engine must remove it as often.
// Only an event without a parent and with several blocks, all held, is a repeated
// announcement, and does not count. The index cannot tell whether an incomplete target holds
// all. It therefore counts nothing in its events without a parent. The shared tier has no counts.
func (x *Index) Store(s *Stored) (int, Outcome) {
	if s.Target < 0 || s.Target >= MaxTargets || s.Tier >= Tiers ||
		s.Blocks != nil && len(s.Blocks) != len(s.Names) {
		return 0, Invalid
	}
	if len(s.Names) == 0 {
		return 0, OK
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	before := x.bytes()
	n, o := x.store(s)
	if o != OK {
		owner := x.owner(s.Target)
		owner.incomplete = true
		owner.ambiguous = owner.ambiguous || o == Contradiction
	}
	x.relieve(before)
	return n, o
}

// leastBytes is what a block takes at least.
const leastBytes = 24

func (x *Index) store(s *Stored) (n int, o Outcome) {
	if int64(len(s.Names))*leastBytes > x.memory.bound {
		return 0, NoRoom
	}
	if x.owner(s.Target).column < 0 {
		x.assign(s.Target)
	}
	if s.Tier != Device {
		x.slower.Store(true)
	}
	x.work.again, x.work.repeated = x.work.again[:0], 0
	if s.Blocks == nil {
		n, o = x.storeKnown(s)
	} else {
		var at cursor
		if at, o = x.locate(s); o == OK {
			n, o = x.lay(s, at)
		}
	}
	if x.repeats(s, o) {
		x.countRepeats(s)
	}
	if s.Tier == Shared && n > 0 {
		x.share(s.Target)
	}
	return n, o
}

// repeats reports whether the event has blocks that the target has stored once more.
func (x *Index) repeats(s *Stored, o Outcome) bool {
	if x.work.repeated == 0 || s.Tier == Shared {
		return false
	}
	if s.HasParent {
		return true
	}
	all := x.work.repeated == len(s.Names)
	return !x.owners[s.Target].incomplete && (len(s.Names) == 1 || !all && o == OK)
}

func (x *Index) countRepeats(s *Stored) {
	owner := &x.owners[s.Target]
	if owner.repeats == nil {
		owner.repeats = make(map[repeat]int32)
	}
	before := len(owner.repeats)
	for _, a := range x.work.again {
		for i := range a.n {
			owner.repeats[repeat{a.at + place(i), s.Tier}]++
		}
	}
	x.memory.repeats += int64(len(owner.repeats)-before) * repeatBytes
}

// storeKnown records blocks by their names alone.
func (x *Index) storeKnown(s *Stored) (n int, o Outcome) {
	for _, name := range s.Names {
		r, i := x.known(name)
		if r == nil || x.owners[s.Target].ambiguous && !x.heldBy(r, i, s.Target) {
			o = UnknownName
			continue
		}
		x.hold(s, r, r.view.Load().hashes, i, i+1)
		n++
	}
	return n, o
}

// cursor is a position in the trie: before block i of a run. run is nil at the top.
type cursor struct {
	run *run
	i   int32
}

// locate returns where the event's blocks begin. After a contradiction, it trusts the target's
// names only where the target itself holds the parent.
func (x *Index) locate(s *Stored) (cursor, Outcome) {
	if !s.HasParent {
		return cursor{}, OK
	}
	// The chain that the last event has extended is often the one that this event extends.
	r, i := x.work.stored.run, x.work.stored.i-1
	if r == nil || i < 0 || int(i) >= len(r.names) || r.names[i] != s.Parent || !x.holds(r, i) {
		r, i = x.known(s.Parent)
	}
	if r == nil {
		return cursor{}, UnknownParent
	}
	ambiguous, other := x.owners[s.Target].ambiguous, s.Root != 0 && r.root != s.Root
	switch {
	case (ambiguous || other) && !x.heldBy(r, i, s.Target):
		return cursor{}, UnknownParent
	case other, s.Root == 0 && ambiguous:
		return cursor{}, Contradiction
	}
	return cursor{r, i + 1}, OK
}

// lay records the event's blocks from a position on.
func (x *Index) lay(s *Stored, at cursor) (n int, o Outcome) {
	root := s.Root
	if at.run != nil {
		root = at.run.root
	}
	for n < len(s.Blocks) && o == OK {
		var taken int
		if r := at.run; r != nil {
			hashes := r.view.Load().hashes
			if same := approx.Common(hashes[at.i:], s.Blocks[n:]); same > 0 {
				taken, o = x.retain(s, at, n, same)
				n += taken
				at.i += int32(taken)
				continue
			}
		}
		if next := x.kids.Load().find(at.run, at.i, root, s.Blocks[n]); next != nil {
			at = cursor{next, 0}
			continue
		}
		r := at.run
		if r == nil || int(at.i) < len(r.view.Load().hashes) || at.i == runSize {
			if r, o = x.begin(s, at, root, n); o != OK {
				break
			}
			at = cursor{r, 0}
			taken, o = x.write(s, r, n)
			x.attachOrFree(r, taken)
		} else {
			taken, o = x.write(s, r, n)
		}
		n += taken
		at.i += int32(taken)
	}
	x.work.stored = at
	return n, o
}

// begin returns a new run for the event's blocks from the n-th on.
func (x *Index) begin(s *Stored, at cursor, root uint64, n int) (*run, Outcome) {
	id := uint32(len(x.runs))
	if last := len(x.freeRuns) - 1; last >= 0 {
		id, x.freeRuns = x.freeRuns[last], x.freeRuns[:last]
	} else if id >= maxRuns {
		return nil, NoRoom
	} else {
		x.runs = append(x.runs, nil)
	}
	r := &run{first: s.Blocks[n], root: root, up: at.run, after: at.i, id: id}
	r.view.Store(&view{})
	x.runs[id] = r
	x.memory.runs += runBytes + viewBytes
	return r, OK
}

// attachOrFree shows readers a new run, or drops it if its first block was refused.
func (x *Index) attachOrFree(r *run, blocks int) {
	if blocks > 0 {
		x.attach(r)
		return
	}
	v := r.view.Load()
	x.memory.runs -= runBytes + v.bytes() + storageBytes(v.hashes)
	x.runs[r.id] = nil
	x.freeRuns = append(x.freeRuns, r.id)
	r.names = nil
}

// write appends the event's blocks from the n-th on to a run, as many as it has room for. It
// stops before a contradiction.
func (x *Index) write(s *Stored, r *run, n int) (int, Outcome) {
	old := len(r.names)
	count := min(len(s.Blocks)-n, runSize-old)
	hashes := x.reserve(r, s.Blocks[n:n+count])
	x.work.run, x.work.from, x.work.to = r, int32(old), int32(old)
	o := OK
	for i, h := range x.hashes(s.Names[n : n+count]) {
		r.names = r.names[:old+i+1]
		if o = x.nameBlock(s.Names[n+i], h, r, int32(old+i), false); o != OK {
			r.names = r.names[:old+i]
			count = i
			break
		}
		x.work.to++
	}
	x.work.run = nil
	if count == 0 {
		return 0, o
	}
	hashes = hashes[:old+count]
	if k := max(old, min(int(r.high), old+count)); k < old+count {
		copy(hashes[k:], s.Blocks[n+k-old:n+count])
	}
	x.hold(s, r, hashes, int32(old), int32(old+count))
	return count, o
}

// reserve makes room for more blocks, and returns the hashes of the run. Readers may still
// look at blocks that the run has lost since. Their hashes stay if the new ones are equal.
// Otherwise the run moves.
func (x *Index) reserve(r *run, blocks []uint64) []uint64 {
	hashes := r.view.Load().hashes
	old := len(hashes)
	need := old + len(blocks)
	if need <= cap(hashes) {
		seen := hashes[:max(old, min(int(r.high), need))][old:]
		if approx.Common(seen, blocks) == len(seen) {
			return hashes
		}
	}
	hashes = x.move(r, hashes, room(need))
	x.show(r, hashes, Device, r.view.Load().device)
	return hashes
}

// retain records that the target holds blocks that are in the trie: count of them from the
// cursor on, the event's from the n-th on. It stops before a contradiction.
func (x *Index) retain(s *Stored, at cursor, n, count int) (int, Outcome) {
	r, o := at.run, OK
	untidy := x.normalise(r)
	valid := x.columns.Load().valid
	x.work.run, x.work.from, x.work.to = r, at.i, at.i
	end := at.i + int32(count)
	for i := at.i; i < end && o == OK; {
		held, to := r.view.Load().held(i, end, valid)
		for i < to && o == OK {
			names := s.Names[n+int(i-at.i) : n+int(to-at.i)]
			if held { // by these names already, as a rule
				i += int32(approx.Common(r.names[i:to], names))
				if x.work.to = i; i == to {
					break
				}
				names = s.Names[n+int(i-at.i):]
			}
			if o = x.nameBlock(names[0], x.names.hash(names[0]), r, i, held); o == OK {
				i++
				x.work.to = i
			}
		}
	}
	taken := x.work.to - at.i
	x.work.run = nil
	if taken > 0 {
		x.hold(s, r, r.view.Load().hashes, at.i, at.i+taken)
	}
	if untidy {
		x.tidy(r)
	}
	return int(taken), o
}

// hold records that the target holds blocks of a run, which have names.
func (x *Index) hold(s *Stored, r *run, hashes []uint64, from, to int32) {
	owner := &x.owners[s.Target]
	added := int64(0)
	segments := x.edited(r.view.Load().tier(s.Tier), from, to, func(held set, from, end int32) set {
		if held.has(owner.column) {
			x.work.again = append(x.work.again, span{r.at(from), end - from})
			x.work.repeated += int(end - from)
			return held
		}
		added += int64(end - from)
		return held.toggled(owner.column)
	})
	if added > 0 || len(hashes) != len(r.view.Load().hashes) {
		x.show(r, hashes, s.Tier, segments)
		owner.blocks[s.Tier] += added
	}
	r.hot = true
}
