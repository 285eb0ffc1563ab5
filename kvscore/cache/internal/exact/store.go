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
	n, o := x.store(s)
	x.count(s.Target, o)
	x.relieve()
	return n, o
}

func (x *Index) count(target int, o Outcome) {
	switch o {
	case OK, Invalid:
		return
	case UnknownParent:
		x.stats.UnknownParents++
	case UnknownName:
		x.stats.UnknownNames++
	case Contradiction:
		x.stats.Contradictions++
		x.owner(target).ambiguous = true
	case NoRoom:
		x.stats.NoRooms++
	}
	x.owner(target).incomplete = true
}

// leastBytes is what a block takes at least.
const leastBytes = 24

func (x *Index) store(s *Stored) (n int, o Outcome) {
	if int64(len(s.Names))*leastBytes > x.memory.bound {
		return 0, NoRoom
	}
	x.owner(s.Target)
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
		w := &x.sharing[s.Target/64]
		w.Store(w.Load() | 1<<(s.Target%64))
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
	r := &x.owners[s.Target].repeats
	before := r.bytes()
	for _, a := range x.work.again {
		for i := range a.n {
			r.add(repeatKey(a.at+place(i), s.Tier))
		}
	}
	x.memory.repeats += r.bytes() - before
}

// storeKnown records blocks by their names alone.
func (x *Index) storeKnown(s *Stored) (n int, o Outcome) {
	for _, name := range s.Names {
		r, i := x.known(s.Target, name)
		if r == nil || x.owners[s.Target].ownNames && !x.heldBy(r, i, s.Target) {
			o = UnknownName
			continue
		}
		x.hold(s, r, i, i+1)
		n++
	}
	return n, o
}

// cursor is a position in the trie: before block i of a run. run is nil at the top.
type cursor struct {
	run *run
	i   int32
}

// locate returns where the event's blocks begin.
func (x *Index) locate(s *Stored) (cursor, Outcome) {
	if !s.HasParent {
		return cursor{}, OK
	}
	// The chain that the last event has extended is often the one that this event extends.
	r, i, owner := x.work.stored.run, x.work.stored.i-1, &x.owners[s.Target]
	if r == nil || owner.ownNames || i < 0 || int(i) >= len(r.names) || r.names[i] != s.Parent || !x.holds(r, i) {
		r, i = x.known(s.Target, s.Parent)
	}
	switch {
	case r == nil,
		(s.Root != 0 && r.root != s.Root || s.Root == 0 && owner.ownNames) && !x.heldBy(r, i, s.Target):
		return cursor{}, UnknownParent
	case s.Root != 0 && r.root != s.Root, s.Root == 0 && owner.ambiguous:
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
		if !at.inside() {
			next := x.below(at.run, root, s.Blocks[n])
			if next == nil {
				var taken int
				at, taken, o = x.extend(s, at, root, n)
				n += taken
				continue
			}
			at = cursor{next, 0}
		}
		v := at.run.view.Load()
		same := approx.Common(v.hashes[at.i:], s.Blocks[n:])
		if same == 0 {
			// A contradiction leaves the run whole. After the division, extend claims again.
			if _, o = x.claim(s.Target, s.Names[n], x.names.hash(s.Names[n]), nil, 0); o != OK {
				return n, o
			}
			x.split(at.run, at.i)
			continue
		}
		var taken int
		taken, o = x.retain(s, at, n, same)
		n += taken
		at.i += int32(taken)
	}
	x.work.stored = at
	return n, o
}

func (c cursor) inside() bool {
	return c.run != nil && int(c.i) < len(c.run.view.Load().hashes)
}

// below returns the run after another that begins with the block, or nil.
func (x *Index) below(r *run, root, block uint64) *run {
	if r == nil {
		return x.top.Load().find(topKey(root, block), root, block)
	}
	if k := r.view.Load().kids; k != nil {
		return k.find(keyOf(block), root, block)
	}
	return nil
}

// retain records that the target holds blocks that are in the trie: count of them from the
// cursor on, the event's from the n-th on. It stops before a contradiction.
func (x *Index) retain(s *Stored, at cursor, n, count int) (int, Outcome) {
	r, o := at.run, OK
	x.normalise(r)
	x.work.run, x.work.from, x.work.to = r, at.i, at.i
	end := at.i + int32(count)
	for i := at.i; i < end && o == OK; {
		held, to := r.view.Load().held(i, end)
		names := s.Names[n+int(i-at.i) : n+int(to-at.i)]
		if held {
			i, o = x.rename(s.Target, r, i, names)
		} else {
			i, o = x.revive(s.Target, r, i, names)
		}
	}
	taken := x.work.to - at.i
	x.work.run = nil
	if taken > 0 {
		x.hold(s, r, at.i, at.i+taken)
	}
	return int(taken), o
}

// rename makes sure that names lead to held blocks from i on.
func (x *Index) rename(target int, r *run, i int32, names []uint64) (int32, Outcome) {
	for k := 0; k < len(names); {
		if !x.owners[target].ownNames {
			same := approx.Common(r.names[int(i):int(i)+len(names)-k], names[k:])
			i += int32(same)
			x.work.to = i
			if k += same; k == len(names) {
				break
			}
		}
		c, o := x.claim(target, names[k], x.names.hash(names[k]), r, i)
		if o != OK {
			return i, o
		}
		if !c.done {
			x.also(r, i, c)
		}
		i++
		k++
		x.work.to = i
	}
	return i, OK
}

// revive gives names to blocks from i on that nobody holds.
func (x *Index) revive(target int, r *run, i int32, names []uint64) (int32, Outcome) {
	for _, name := range names {
		c, o := x.claim(target, name, x.names.hash(name), nil, 0)
		if o != OK {
			return i, o
		}
		x.name(r, i, c)
		i++
		x.work.to = i
	}
	return i, OK
}

// hold records that the target holds blocks of a run, which have names.
func (x *Index) hold(s *Stored, r *run, from, to int32) {
	x.holdIn(s, r, r.view.Load().hashes, from, to)
}

func (x *Index) holdIn(s *Stored, r *run, hashes []uint64, from, to int32) {
	e := edit{run: r, tier: s.Tier, target: s.Target, kind: add}
	segments := x.edited(&e, r.view.Load().tier(s.Tier), from, to)
	if e.n > 0 {
		x.cover(r, hashes, s.Tier, segments)
		x.owners[s.Target].blocks[s.Tier] += e.n
	}
	r.hot = true
}
