package affinity

import "math/rand/v2"

const (
	// sampleSize is the number of bindings in a sample from which the longest idle one is
	// evicted. Of 16, that one is on average among the 6% that have been idle longest.
	sampleSize = 16
	// maxDraws bounds the search for a sample of one scope. If the scope has a twentieth of
	// all bindings, 256 draws miss it once in 500,000 times.
	maxDraws = 256
	// chunkSize is the number of entries that a pass takes under one lock.
	chunkSize = 1024
)

// roster lists the entries in no order, so that a random sample and a pass over all of them
// are cheap. It keeps their number within the limits. The store's lock guards it.
type roster struct {
	slots    []slot
	counts   map[uint32]int // of entries by scope
	max      int            // of entries; SetMaxSessions lowers it in steps
	maxShare int            // of a scope's entries: half of those that the store may have
}

type slot struct {
	*entry
	// check is a time before which the entry is not overdue, so that a sweep need not load
	// every entry from memory.
	check int64
}

// maxEvicted is how many bindings of its scope a new one may evict. A scope above its share comes
// down with what it adds.
const maxEvicted = 2

// add adds the entry if there is room, and returns true. If not, it returns an entry to evict
// first, nil if it found none. evicted counts those that the caller has evicted. A scope at its
// share evicts its own bindings. Scope 0 may take everything that the others leave: it evicts its
// own bindings only while the store is full.
func (ro *roster) add(e *entry, now int64, evicted int) (added bool, victim *entry) {
	n := ro.counts[e.Scope]
	full := len(ro.slots) >= ro.max
	own := n >= ro.maxShare && (full || e.Scope != 0) && evicted < maxEvicted
	if full || own {
		return false, ro.pick(now, e.Scope, own)
	}
	ro.counts[e.Scope] = n + 1
	e.slot = int32(len(ro.slots)) //nolint:gosec // memory ends before
	ro.slots = append(ro.slots, slot{e, e.due()})
	return true, nil
}

func (ro *roster) remove(e *entry) {
	last := len(ro.slots) - 1
	moved := ro.slots[last]
	ro.slots[e.slot] = moved
	moved.entry.slot = e.slot
	ro.slots[last] = slot{}
	ro.slots = ro.slots[:last]
	if n := ro.counts[e.Scope]; n > 1 {
		ro.counts[e.Scope] = n - 1
	} else {
		delete(ro.counts, e.Scope)
	}
}

// pick returns an overdue entry of a random sample, or else the longest idle one. own limits
// the sample to the scope. In a small roster the sample is all entries. It returns nil if
// there are none.
func (ro *roster) pick(now int64, scope uint32, own bool) (victim *entry) {
	n := len(ro.slots)
	draws := sampleSize
	if own {
		draws = maxDraws
	}
	small := n <= draws
	for i, seen := 0, 0; i < min(n, draws) && (small || seen < sampleSize); i++ {
		at := i
		if !small {
			at = rand.IntN(n) //nolint:gosec // only a sample
		}
		e := ro.slots[at].entry
		if own && e.Scope != scope {
			continue
		}
		seen++
		if e.due() <= now {
			return e
		}
		if victim == nil || e.used < victim.used {
			victim = e
		}
	}
	return victim
}

// limit sets the bounds. It does not set max below the present number of entries.
func (ro *roster) limit(maxSessions int) {
	ro.max = max(maxSessions, len(ro.slots))
	ro.maxShare = max(1, maxSessions/2)
}

// chunk appends up to chunkSize entries below index end to buf, or the overdue ones of them. It
// returns the index for the next call, 0 at the end.
//
// A pass downwards misses no entry that stays during the pass. A removal moves the last
// entry down; that one has either been visited or will be. A pass may visit an entry twice.
func (ro *roster) chunk(end int, now int64, overdue bool, buf []*entry) ([]*entry, int) {
	end = min(end, len(ro.slots))
	begin := max(0, end-chunkSize)
	for i := begin; i < end; i++ {
		s := &ro.slots[i]
		if overdue {
			if s.check > now {
				continue
			}
			if s.check = s.due(); s.check > now {
				continue
			}
		}
		buf = append(buf, s.entry)
	}
	return buf, begin
}
