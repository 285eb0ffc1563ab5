package body

import (
	"net/http"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// bodyMemory counts the bytes of request bodies of all pools: their memory is
// pooled for the process.
var bodyMemory usage

const (
	// MaxBytes bounds the bytes of request bodies that a pool keeps in memory.
	MaxBytes = 2 << 30
	// alwaysRoom is the longest body, in bytes, that is read whatever others take.
	alwaysRoom = 512 << 10
	// lookEvery is the least time between two looks at the memory in use.
	lookEvery = 9 * time.Second
)

// Memory counts the bytes of the request bodies that a pool has in memory, and bounds
// them.
type Memory struct {
	Held    atomic.Int64
	uploads uploads
}

// Read reads the body of a request of at most limit bytes into memory. It returns a
// longer body as a stream, and one for which there is no room.
func (m *Memory) Read(r *http.Request, limit int64) (all *Buffer, rest *Stream, err error) {
	return m.uploads.read(r, limit, &m.Held)
}

// HasRoom tells whether a body of a length may be read into memory. Short ones
// always may.
func (m *Memory) HasRoom(length int64) bool {
	return length <= alwaysRoom || m.Held.Load()+length <= MaxBytes
}

// Bytes returns how many bytes are in use.
func (m *Memory) Bytes() int64 { return m.Held.Load() }

// Reserve counts n bytes that the caller uses until it calls release. It returns
// whether they are within the bound.
func (m *Memory) Reserve(n int64) (within bool, release func()) {
	return m.Held.Add(n) <= MaxBytes, func() { m.Held.Add(-n) }
}

// Count has the memory of a buffer counted until that is given back.
func (m *Memory) Count(b *Buffer) { b.count(&m.Held) }

// Upkeep ends slow uploads if memory is short, returns how many, and returns unused
// memory to the system after a burst. It is to be called every ten seconds.
func (m *Memory) Upkeep(t time.Time) (ended int) {
	ended = m.uploads.endSlow(m.Held.Load() > MaxBytes/2)
	if bodyMemory.fell(t) {
		returnMemory()
	}
	return ended
}

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

// fell reports that a burst is over: for two looks, at
// most half of the highest peak was in use, and worthReturning less. It then
// counts from there, so that one burst is reported once and steady traffic
// never. The upkeep of every pool asks; only one of them gets to look.
func (u *usage) fell(t time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if t.Sub(u.looked) < lookEvery {
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
