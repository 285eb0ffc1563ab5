package affinity

import "sync"

// sampleSize is the number of bindings in a sample from which the longest idle one is
// evicted. Of 16, that one is on average among the 6% that have been idle longest.
const sampleSize = 16

// roster lists the entries in no order, so that a random sample and a pass over all of them
// are cheap. It keeps their number and size within the limits. It takes no other lock
// while it holds its own.
type roster struct {
	mu          sync.Mutex
	entries     []*entry
	bytes       int64
	maxSessions int
	maxBytes    int64
	shrinking   int // SetLimits calls at work
	random      uint64
}

// admission is the answer of [roster.add].
type admission uint8

const (
	admitted admission = iota
	needsRoom
	tooLarge
)

// add adds the entry if there is room. If not, it returns an entry to evict first, and the
// time of that entry's last use.
//
// freed is the size of what the caller has evicted so far. While SetLimits lowers the
// limits, a caller evicts only what its own entry needs. SetLimits evicts the rest, so
// that requests do not wait for it.
func (ro *roster) add(e *entry, now, freed int64) (a admission, victim *entry, used int64) {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	cost := e.cost()
	if cost > ro.maxBytes {
		return tooLarge, nil, 0
	}
	fits := len(ro.entries) < ro.maxSessions && ro.bytes+cost <= ro.maxBytes
	if !fits && (ro.shrinking == 0 || freed < cost) {
		victim, used = ro.pick(now)
		return needsRoom, victim, used
	}
	e.slot = len(ro.entries)
	ro.entries = append(ro.entries, e)
	ro.bytes += cost
	return admitted, nil, 0
}

// remove removes the entry. A second call does nothing.
func (ro *roster) remove(e *entry) {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	if e.slot < 0 {
		return
	}
	last := len(ro.entries) - 1
	moved := ro.entries[last]
	ro.entries[e.slot] = moved
	moved.slot = e.slot
	ro.entries[last] = nil
	ro.entries = ro.entries[:last]
	ro.bytes -= e.cost()
	e.slot = -1
}

// pick returns an overdue entry of a random sample, or else the longest idle one. In a
// small roster the sample is all entries. It returns nil if there are none. The caller
// holds mu.
func (ro *roster) pick(now int64) (victim *entry, used int64) {
	n := len(ro.entries)
	for i := range min(n, sampleSize) {
		if n > sampleSize {
			i = int(ro.next() % uint64(n))
		}
		e := ro.entries[i]
		if e.due.Load() <= now {
			return e, e.used.Load()
		}
		if u := e.used.Load(); victim == nil || u < used {
			victim, used = e, u
		}
	}
	return victim, used
}

// next is SplitMix64 (Steele, Lea and Flood, 2014). It is good enough for the sample and
// needs no lock besides the roster's.
func (ro *roster) next() uint64 {
	ro.random += 0x9e3779b97f4a7c15
	z := ro.random
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// over returns an entry to evict if the limits are exceeded, or nil.
func (ro *roster) over(now int64) (victim *entry, used int64) {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	if len(ro.entries) <= ro.maxSessions && ro.bytes <= ro.maxBytes {
		return nil, 0
	}
	return ro.pick(now)
}

func (ro *roster) setLimits(maxSessions int, maxBytes int64) {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	ro.maxSessions, ro.maxBytes = maxSessions, maxBytes
	ro.shrinking++
}

func (ro *roster) shrunk() {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	ro.shrinking--
}

// size returns the number of entries and their cost.
func (ro *roster) size() (int, int64) {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	return len(ro.entries), ro.bytes
}

// chunk appends up to chunkSize entries below index end to buf. It returns the index for
// the next call, 0 at the end.
//
// A pass downwards misses no entry that stays during the pass. A removal moves the last
// entry down; that one has either been visited or will be. A pass may visit an entry twice.
func (ro *roster) chunk(end int, buf []*entry) ([]*entry, int) {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	end = min(end, len(ro.entries))
	begin := max(0, end-chunkSize)
	return append(buf, ro.entries[begin:end]...), begin
}

// chunkSize is the number of entries that a pass takes under one lock.
const chunkSize = 512

// drain empties the roster and returns its entries.
func (ro *roster) drain() []*entry {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	all := ro.entries
	for _, e := range all {
		e.slot = -1
	}
	ro.entries, ro.bytes = nil, 0
	return all
}
