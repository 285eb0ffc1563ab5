package exact

import (
	"sync/atomic"
	"unsafe"
)

// runSize is the greatest number of blocks in a run.
const (
	offsetBits = 9
	runSize    = 1 << offsetBits
	maxRuns    = 1 << (refBits - offsetBits)
)

// run is a piece of a chain: consecutive blocks. Other runs continue it after its last block or
// after an earlier one, so it is never divided. What readers see of it changes as a whole, in its
// view. A run that is gone keeps its last view, for readers that are still there.
type run struct {
	view  atomic.Pointer[view]
	first uint64 // its first block
	root  uint64
	up    *run // that it continues, nil at the top
	after int32
	id    uint32

	// for the writer
	names   []uint64 // of each held block; those of other blocks are left from before
	kids    []*run
	place   int32   // in the kids of up
	high    int16   // blocks that readers may have seen: these hashes must not change
	hot     bool    // an event has touched it since the last round of eviction
	aliases []alias // further names of its blocks
}

type alias struct {
	name uint64
	i    int32
}

// A place is a number for a block: its run and its offset there.
type place uint64

func (r *run) at(i int32) place { return place(r.id)<<offsetBits | place(i) }

// find returns the run and the index of a place, nil if nothing is there.
func (x *Index) find(p place) (*run, int32) {
	r, i := x.runs[p>>offsetBits], int32(p&(runSize-1))
	if r == nil || int(i) >= len(r.names) {
		return nil, 0
	}
	return r, i
}

// view is a state of a run. It does not change.
type view struct {
	hashes []uint64
	device []segment
	slow   *[Tiers - 1][]segment // nil if only the device has blocks
	inline [2]segment            // the device's, if there are no more
}

// segment says that the targets of a set hold the blocks up to end, from the end of the
// segment before. Segments end with the last held block.
type segment struct {
	set
	end int32
}

const (
	runBytes     = int64(unsafe.Sizeof(run{})) + 8
	viewBytes    = int64(unsafe.Sizeof(view{}))
	segmentBytes = int64(unsafe.Sizeof(segment{}))
)

// tiers is the number of tiers that may have blocks.
func (v *view) tiers() Tier {
	if v.slow == nil {
		return 1
	}
	return Tiers
}

func (v *view) tier(t Tier) []segment {
	if t == Device {
		return v.device
	}
	if v.slow == nil {
		return nil
	}
	return v.slow[t-1]
}

func (v *view) bytes() int64 {
	n := viewBytes
	if len(v.device) > len(v.inline) {
		n += int64(len(v.device)) * segmentBytes
	}
	n += moreBytes(v.device)
	if v.slow != nil {
		n += int64(unsafe.Sizeof(*v.slow))
		for _, s := range v.slow {
			n += int64(len(s))*segmentBytes + moreBytes(s)
		}
	}
	return n
}

// moreBytes returns the memory of the columns from 64 on. Segments may share it; it counts for
// each of them.
func moreBytes(segments []segment) (n int64) {
	for i := range segments {
		if m := segments[i].more; m != nil {
			n += int64(unsafe.Sizeof(*m)) + 8*int64(len(*m))
		}
	}
	return n
}

// show shows readers new hashes, with a copy of new segments in one tier.
func (x *Index) show(r *run, hashes []uint64, t Tier, segments []segment) {
	old := r.view.Load()
	v := &view{hashes: hashes, slow: old.slow}
	if t == Device {
		v.setDevice(segments, true)
	} else {
		v.setDevice(old.device, false)
		v.setSlow(t, segments)
	}
	x.memory.runs += v.bytes() - old.bytes()
	r.high = max(r.high, int16(len(hashes)))
	r.view.Store(v)
}

// setDevice takes over the segments, or a copy of them.
func (v *view) setDevice(s []segment, clone bool) {
	switch {
	case len(s) <= len(v.inline):
		v.device = v.inline[:copy(v.inline[:], s)]
	case clone:
		v.device = append(make([]segment, 0, len(s)), s...)
	default:
		v.device = s
	}
}

func (v *view) setSlow(t Tier, s []segment) {
	var slow [Tiers - 1][]segment
	if v.slow != nil {
		slow = *v.slow
	}
	slow[t-1] = nil
	if len(s) > 0 {
		slow[t-1] = append(make([]segment, 0, len(s)), s...)
	}
	v.slow = nil
	for _, s := range slow {
		if s != nil {
			v.slow = &slow
		}
	}
}

// held reports whether any of the columns holds block i, and up to which block this is so for
// the same reasons. The latter is at least i+1, and at most end.
func (v *view) held(i, end int32, by set) (bool, int32) {
	held := false
	for t := range v.tiers() {
		segments := v.tier(t)
		if k := search(segments, i); k < len(segments) {
			held = held || segments[k].overlaps(by)
			end = min(end, segments[k].end)
		}
	}
	return held, end
}

// search returns the segment that has block i.
func search(s []segment, i int32) int {
	if len(s) == 0 || i < s[0].end {
		return 0
	}
	low, high := 0, len(s)
	for low < high {
		if mid := (low + high) / 2; s[mid].end <= i {
			low = mid + 1
		} else {
			high = mid
		}
	}
	return low
}

func setAt(s []segment, i int32) set {
	if k := search(s, i); k < len(s) {
		return s[k].set
	}
	return set{}
}

// last returns the number of blocks up to the last held one.
func (v *view) last() int32 {
	n := int32(0)
	for t := range v.tiers() {
		if s := v.tier(t); len(s) > 0 {
			n = max(n, s[len(s)-1].end)
		}
	}
	return n
}

// edited returns the segments with the sets of blocks from up to changed by f, in the scratch
// space. Equal neighbours become one, and empty sets at the end go.
func (x *Index) edited(old []segment, from, to int32, f func(s set, from, end int32) set) []segment {
	out := x.work.segments[:0]
	last := to
	if n := len(old); n > 0 {
		last = max(to, old[n-1].end)
	}
	for pos, i := int32(0), 0; pos < last; {
		var s set
		end := last
		if i < len(old) {
			s, end = old[i].set, old[i].end
		}
		switch {
		case pos < from:
			end = min(end, from)
		case pos < to:
			end = min(end, to)
			s = f(s, pos, end)
		}
		if n := len(out); n > 0 && out[n-1].equal(s) {
			out[n-1].end = end
		} else {
			out = append(out, segment{s, end})
		}
		if pos = end; i < len(old) && old[i].end == end {
			i++
		}
	}
	x.work.segments = out[:0]
	for n := len(out); n > 0 && out[n-1].isZero(); n = len(out) {
		out = out[:n-1]
	}
	return out
}

func storageBytes(hashes []uint64) int64 { return int64(cap(hashes)) * 16 }

// room returns a capacity for n blocks: 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512. The
// allocator has these sizes.
func room(n int) int {
	size := 4
	for size < n {
		switch {
		case size < 64:
			size *= 2
		case size&(size-1) == 0:
			size = size * 3 / 2
		default:
			size = size / 3 * 4
		}
	}
	return size
}

// move gives a run another storage for its blocks, and returns its hashes. They share one
// allocation with the names.
func (x *Index) move(r *run, hashes []uint64, size int) []uint64 {
	both := make([]uint64, 2*size)
	h, names := both[:0:size], both[size:size:2*size]
	x.memory.runs += storageBytes(h) - storageBytes(hashes)
	h = append(h, hashes...)
	r.names = append(names, r.names[:len(hashes)]...)
	r.high = 0
	return h
}

// deepest returns the number of blocks up to the last one after which a run continues.
func (r *run) deepest() (n int32) {
	for _, k := range r.kids {
		n = max(n, k.after)
	}
	return n
}

// tidy drops the blocks at the end of a run that have no holder, if no run continues them. If
// none is left, the run goes, and tidy looks at the run above.
func (x *Index) tidy(r *run) {
	for r != nil {
		v := r.view.Load()
		n := v.last()
		if int(n) < len(v.hashes) {
			n = max(n, r.deepest())
		}
		if n == 0 {
			r = x.free(r)
			continue
		}
		size := room(int(n))
		if int(n) < len(v.hashes) || size*2 <= cap(v.hashes) {
			hashes := v.hashes[:n]
			r.names = r.names[:n]
			if size*2 <= cap(hashes) {
				hashes = x.move(r, hashes, size)
			}
			x.show(r, hashes, Device, v.device)
		}
		return
	}
}

// free drops a run that no run continues and whose blocks have no names. It returns the run
// above, nil at the top.
func (x *Index) free(r *run) *run {
	v := r.view.Load()
	x.memory.runs -= runBytes + v.bytes() + storageBytes(v.hashes)
	r.names = nil
	x.kids.Load().remove(r.key(), r)
	x.thin()
	if up := r.up; up != nil {
		last := len(up.kids) - 1
		up.kids[r.place] = up.kids[last]
		up.kids[r.place].place = r.place
		up.kids[last] = nil
		up.kids = up.kids[:last]
		if last == 0 {
			up.kids = nil
		}
	}
	x.runs[r.id] = nil
	x.freeRuns = append(x.freeRuns, r.id)
	return r.up
}
