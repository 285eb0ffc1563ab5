package exact

import (
	"sync/atomic"
	"unsafe"
)

// run is an edge of the trie: consecutive blocks without a branch in between. What readers
// see of it changes as a whole, in its view. A run that is gone keeps its last view, for
// readers that are still there. Its first block and root never change.
type run struct {
	view  atomic.Pointer[view]
	first uint64
	root  uint64
	up    *kids
	// names has the name of each held block. Those of other blocks are left from before. A
	// run that is being extended has more names than blocks.
	names []uint64
	chunk uint32
	off   int16 // the first block's offset in the chunk
	high  int16 // blocks that readers may have seen: these hashes must not change
	hot   bool  // an event has touched it since the last round of eviction
}

// view is a state of a run. It does not change, except that sets lose cleared targets, and
// that kids come and go.
type view struct {
	hashes []uint64
	kids   *kids
	device []segment
	slow   *[Tiers - 1][]segment // nil if only the device has blocks
	inline [2]segment            // the device's, if there are no more
}

// segment says that the targets of a set hold the blocks up to end, from the end of the
// segment before. Segments end with the last held block.
type segment struct {
	set *set
	end int32
}

const (
	viewBytes    = int64(unsafe.Sizeof(view{}))
	runBytes     = int64(unsafe.Sizeof(run{}))
	segmentBytes = int64(unsafe.Sizeof(segment{}))
	slowBytes    = (Tiers - 1) * int64(unsafe.Sizeof([]segment{}))
)

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
	if v.slow != nil {
		n += slowBytes
		for _, s := range v.slow {
			n += int64(len(s)) * segmentBytes
		}
	}
	return n
}

// publish shows readers new hashes and kids with the segments of another view.
func (x *Index) publish(r *run, hashes []uint64, k *kids, from *view) {
	v := &view{hashes: hashes, kids: k, slow: from.slow}
	v.setDevice(from.device, false)
	x.show(r, v)
}

// cover shows readers new hashes and new segments of one tier.
func (x *Index) cover(r *run, hashes []uint64, t Tier, segments []segment) {
	old := r.view.Load()
	v := &view{hashes: hashes, kids: old.kids, slow: old.slow}
	if t == Device {
		v.setDevice(segments, true)
	} else {
		v.setDevice(old.device, false)
		v.setSlow(t, segments)
	}
	x.show(r, v)
}

func (x *Index) show(r *run, v *view) {
	if old := r.view.Load(); old != nil {
		x.memory.runs -= old.bytes()
	}
	x.memory.runs += v.bytes()
	r.high = max(r.high, int16(len(v.hashes)))
	r.view.Store(v)
}

// set gives a new view a copy of one tier's segments.
func (v *view) set(t Tier, s []segment) {
	if t == Device {
		v.setDevice(s, true)
	} else {
		v.setSlow(t, s)
	}
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

// held reports whether any target holds block i, and up to which block this is so for the
// same reasons. The latter is at least i+1, and at most end.
func (v *view) held(i, end int32) (bool, int32) {
	held := false
	for t := range Tier(Tiers) {
		segments := v.tier(t)
		if k := search(segments, i); k < len(segments) {
			held = held || !segments[k].set.empty()
			end = min(end, segments[k].end)
		}
		if v.slow == nil {
			break
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

func setAt(s []segment, i int32) *set {
	if k := search(s, i); k < len(s) {
		return s[k].set
	}
	return nil
}

// last returns the number of blocks up to the last held one.
func (v *view) last() int32 {
	n := int32(0)
	for t := range Tier(Tiers) {
		if s := v.tier(t); len(s) > 0 {
			n = max(n, s[len(s)-1].end)
		}
		if v.slow == nil {
			break
		}
	}
	return n
}

// lags reports whether a cleared target has left empty or equal sets in the view.
func (v *view) lags() bool {
	for t := range Tier(Tiers) {
		for _, s := range v.tier(t) {
			if s.set != nil && (s.set.n == 0 || s.set.dup) {
				return true
			}
		}
		if v.slow == nil {
			break
		}
	}
	return false
}

// storage returns a run's arrays for n blocks: hashes of length 0, and names. They share one
// allocation.
func storage(n int) (hashes, names []uint64) {
	both := make([]uint64, 2*n)
	return both[:0:n], both[n : n : 2*n]
}

func storageBytes(hashes []uint64) int64 { return int64(cap(hashes)) * 16 }

// room returns a capacity for n blocks. The allocator has these sizes.
func room(n int) int {
	size := 4
	for size < n {
		size = next(size)
	}
	return size
}

// next returns the capacity after this one: 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512.
func next(size int) int {
	switch {
	case size < 64:
		return size * 2
	case size&(size-1) == 0:
		return size * 3 / 2
	default:
		return size / 3 * 4
	}
}
