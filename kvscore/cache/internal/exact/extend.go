package exact

import "github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"

// extend adds the event's blocks from the n-th on after the cursor, where the trie has no
// such block. It fills one chunk at most, and returns how many blocks it added.
func (x *Index) extend(s *Stored, at cursor, root uint64, n int) (cursor, int, Outcome) {
	c, o := x.claim(s.Target, s.Names[n], x.names.hash(s.Names[n]), nil, 0)
	if o != OK {
		return at, 0, o
	}
	r := at.run
	if x.extends(r) {
		taken, o := x.write(s, r, n, c)
		return cursor{r, at.i + int32(taken)}, taken, o
	}
	chunk, ok := x.chunks.take()
	if !ok {
		return at, 0, NoRoom
	}
	r = &run{first: s.Blocks[n], root: root, chunk: chunk}
	r.view.Store(&view{})
	x.memory.runs += runBytes + viewBytes
	x.chunks.enlist(r)
	taken, o := x.write(s, r, n, c)
	x.attach(at.run, r)
	return cursor{r, int32(taken)}, taken, o
}

// extends reports whether new blocks can become part of a run.
func (x *Index) extends(r *run) bool {
	if r == nil {
		return false
	}
	v := r.view.Load()
	k := x.chunks.get(r.chunk)
	end := int(r.off) + len(v.hashes)
	return v.kids == nil && end < chunkSize && k.runs[len(k.runs)-1] == r &&
		(k.aliases == 0 || end >= int(k.high))
}

// write appends the event's blocks from the n-th on to a run, as many as its chunk has room
// for. The first has its claim. It stops before a contradiction.
func (x *Index) write(s *Stored, r *run, n int, c claim) (int, Outcome) {
	old := len(r.names)
	count := min(len(s.Blocks)-n, chunkSize-int(r.off)-old)
	hashes := x.reserve(r, s.Blocks[n:n+count])
	x.work.run, x.work.from, x.work.to = r, int32(old), int32(old)
	o := OK
	for i, h := range x.hashes(s.Names[n : n+count]) {
		if i > 0 {
			if c, o = x.claim(s.Target, s.Names[n+i], h, nil, 0); o != OK {
				count = i
				break
			}
		}
		r.names = r.names[:old+i+1]
		x.name(r, int32(old+i), c)
		x.work.to++
	}
	x.work.run = nil
	hashes = hashes[:old+count]
	if k := max(old, min(int(r.high), old+count)); k < old+count {
		copy(hashes[k:], s.Blocks[n+k-old:n+count])
	}
	k := x.chunks.get(r.chunk)
	k.high = max(k.high, r.off+int16(old+count))
	x.holdIn(s, r, hashes, int32(old), int32(old+count))
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
	return x.move(r, hashes, room(need))
}

// move gives a run another storage for its blocks, and returns its hashes.
func (x *Index) move(r *run, hashes []uint64, size int) []uint64 {
	h, names := storage(size)
	x.memory.runs += storageBytes(h) - storageBytes(hashes)
	h = append(h, hashes...)
	r.names = append(names, r.names...)
	r.high = 0
	return h
}

// split divides a run before block i. The run itself becomes the upper part, so that its
// first block stays the same. Places do not change.
func (x *Index) split(r *run, i int32) {
	v := r.view.Load()
	n := int32(len(v.hashes))
	low := &run{first: v.hashes[i], root: r.root, chunk: r.chunk, off: r.off + int16(i), hot: r.hot}
	hashes, names := storage(room(int(n - i)))
	low.names = append(names, r.names[i:]...)
	under := &view{hashes: append(hashes, v.hashes[i:]...), kids: v.kids}
	k := newKids(r, 2) // there will be another
	over := &view{hashes: v.hashes[:i], kids: k}
	for t := range Tier(Tiers) {
		if s := v.tier(t); len(s) > 0 {
			under.set(t, x.part(s, i, n))
			over.set(t, x.part(s, 0, i))
		}
	}
	x.releaseAll(v)
	x.memory.runs += runBytes + storageBytes(hashes) + k.bytes()
	if v.kids != nil {
		v.kids.owner = low
	}
	x.show(low, under)
	k.add(keyOf(low.first), low)
	r.names = r.names[:i]
	x.chunks.enlist(low)
	x.shorten(r, over)
	x.show(r, over)
}

// shorten moves a run that has become much shorter to a smaller storage.
func (x *Index) shorten(r *run, v *view) {
	if size := room(len(v.hashes)); size*2 <= cap(v.hashes) {
		v.hashes = x.move(r, v.hashes, size)
	}
}

// join makes one run of two, if the second is the only one after the first, and has the next
// places.
func (x *Index) join(r *run) {
	v := r.view.Load()
	low := v.kids.only()
	n := int32(len(v.hashes))
	if low == nil || low.chunk != r.chunk || int32(low.off) != int32(r.off)+n {
		return
	}
	under := low.view.Load()
	hashes, names := storage(room(int(n) + len(under.hashes)))
	x.memory.runs += storageBytes(hashes) - storageBytes(v.hashes) - storageBytes(under.hashes)
	x.memory.runs -= runBytes + under.bytes() + v.kids.bytes()
	hashes = append(append(hashes, v.hashes...), under.hashes...)
	r.names = append(append(names, r.names...), low.names...)
	r.high, low.names = 0, nil
	one := &view{hashes: hashes, kids: under.kids}
	for t := range Tier(Tiers) {
		out := x.work.segments[:0]
		for _, s := range v.tier(t) {
			out = x.push(out, s.set, s.end)
		}
		if len(under.tier(t)) > 0 && (len(out) == 0 || out[len(out)-1].end < n) {
			out = x.push(out, nil, n)
		}
		for _, s := range under.tier(t) {
			out = x.push(out, s.set, n+s.end)
		}
		one.set(t, x.trimmed(out))
	}
	x.releaseAll(v)
	x.releaseAll(under)
	if one.kids != nil {
		one.kids.owner = r
	}
	r.hot = r.hot || low.hot
	x.chunks.strike(low)
	x.show(r, one)
}
