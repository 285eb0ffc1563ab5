package handler

import (
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// bodyMemory counts the bytes of request bodies of all pools: their memory is
// pooled for the process.
var bodyMemory usage

// worthReturning is the least fall, in bytes, after which memory is returned to
// the system.
const worthReturning = 64 << 20

// usage counts bytes in use and notices when a burst is over.
type usage struct {
	used atomic.Int64
	peak atomic.Int64 // of used, since the last look

	mu     sync.Mutex
	looked time.Time
	last   int64 // peak as of the last look
	high   int64 // the highest peak since memory was last returned
}

// add counts n more bytes, or less if n is negative.
func (u *usage) add(n int64) {
	used := u.used.Add(n)
	for peak := u.peak.Load(); used > peak && !u.peak.CompareAndSwap(peak, used); {
		peak = u.peak.Load()
	}
}

// fell reports that a burst is over: for two looks, which are upkeep apart, at
// most half of the highest peak was in use, and worthReturning less. It then
// counts from there, so that one burst is reported once and steady traffic
// never. The upkeep of every pool asks; only one of them gets to look.
func (u *usage) fell(t time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if t.Sub(u.looked) < upkeep*9/10 {
		return false
	}
	peak := u.peak.Swap(u.used.Load())
	recent := max(peak, u.last)
	u.looked, u.last, u.high = t, peak, max(u.high, peak)
	if recent > u.high/2 || u.high-recent < worthReturning {
		return false
	}
	u.high = recent
	return true
}

// returnMemory returns unused memory to the system. An idle process would
// collect garbage only every two minutes, and a sync.Pool keeps its memory over
// one collection: this makes two.
func returnMemory() {
	runtime.GC()
	debug.FreeOSMemory()
}
