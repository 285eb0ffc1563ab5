package index

// Work is counted in records visited, about 0.1 µs each in a large index. These
// are the bounds of one call.
const (
	// roomWork is for what a chain needs room for at once.
	roomWork = 6144
	// settleWork is for what is left from earlier calls.
	settleWork = 1024
	// copied is how many hashes can be copied, or entries of the table, in the
	// time that a record takes.
	copied = 64
)

// begin lets a call do its work.
func (x *Index) begin() { x.left = roomWork }

func (x *Index) spend(n int) {
	x.left -= n
	x.worked += uint64(n)
}

// settle ends a call that concerns a slot, or none: it does some of the work
// that is left.
func (x *Index) settle(s *slot) {
	x.spend(x.table.worked / copied)
	x.table.worked = 0
	x.left = settleWork
	if s != nil {
		x.catchUp(s, 0)
	}
	x.shrink()
}

// shrink brings the index within its bound, and below it: a reserve makes room
// for most chains without work.
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

// Step does about so much of the work that is left after memory or a capacity
// was lowered or a slot cleared, counted in records visited. It reports whether
// there may be more.
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
