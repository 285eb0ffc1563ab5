package approx

// Bounds of the work in one call, in records visited. A record takes about 0.1 µs in a large
// index.
const (
	// roomWork is for the room that a chain needs at once.
	roomWork = 6144
	// settleWork is for the work that earlier calls have left.
	settleWork = 1024
	// copied is the number of hashes or table entries that are copied in the time of one
	// record.
	copied = 64
)

// begin sets the work that a call may do.
func (x *Index) begin() { x.left = roomWork }

func (x *Index) spend(n int) {
	x.left -= n
	x.worked += uint64(n)
}

// settle ends a call for a slot, or for none if s is nil. It does some of the remaining
// work.
func (x *Index) settle(s *slot) {
	x.spend(x.table.worked / copied)
	x.table.worked = 0
	x.left = settleWork
	if s != nil {
		x.catchUp(s, 0)
	}
	x.shrink()
}

// shrink brings the index below its bound. The reserve gives most chains room without
// work.
func (x *Index) shrink() {
	if x.runs.count() == 0 && len(x.runs.pages)+len(x.holds.pages) > 2 {
		x.empty()
	}
	for x.left > 0 {
		over := x.Bytes() - x.memory + x.memory/64
		if over <= 0 || !x.reclaim(over) {
			break
		}
	}
	x.limit = max(x.memory, min(x.limit, x.Bytes()))
}

// Step does a part of the work that a lower memory or capacity, or a cleared slot, leaves.
// work is the number of records to visit. It reports whether there may be more.
func (x *Index) Step(work int) (more bool) {
	x.left = max(work, 1)
	for i := range x.slots {
		x.catchUp(&x.slots[i], 0)
		x.spend(1)
	}
	x.shrink()
	x.spend(x.table.worked / copied)
	x.table.worked = 0
	return x.left <= 0
}
