package affinity

import "sync"

// sampleSize is how many bindings compete to be the one that makes room. The
// loser of 16 is on average among the 6% that have been idle longest.
const sampleSize = 16

// A roster lists the held entries in no order, which makes a random sample and
// a pass over all of them cheap, and keeps their number and size within the
// limits. It takes no other lock under its own.
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

// add takes the entry in if there is room. If not, it names an entry that
// should go first and when that was used last.
//
// freed is the size of what the caller evicted so far. While limits are being
// lowered, a newcomer pays for its own place only: the rest is for SetLimits,
// and a request need not wait for it.
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

// remove strikes the entry off; doing so twice is harmless.
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

// pick returns an overdue entry of a random sample, or else the one that has
// been idle longest; of a small roster, of all. It returns nil if there is
// none. The caller holds mu.
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

// next is SplitMix64 (Steele, Lea and Flood, 2014). The sample needs no better
// source, and this one needs no lock besides the roster's.
func (ro *roster) next() uint64 {
	ro.random += 0x9e3779b97f4a7c15
	z := ro.random
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// over returns an entry that should go if the limits are exceeded, or nil.
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

// chunk appends to buf those entries below index end, at most chunkSize of
// them, and returns the index to go on with; it is 0 at the end.
//
// Going downwards misses no entry that is there all the time, although others
// come and go meanwhile: a removal moves the last entry down, which has either
// been visited or is not yet due to be. An entry may be visited twice.
func (ro *roster) chunk(end int, buf []*entry) ([]*entry, int) {
	ro.mu.Lock()
	defer ro.mu.Unlock()
	end = min(end, len(ro.entries))
	begin := max(0, end-chunkSize)
	return append(buf, ro.entries[begin:end]...), begin
}

// chunkSize is how many entries a pass over all takes under one lock.
const chunkSize = 512

// drain empties the roster and returns what was in it.
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
