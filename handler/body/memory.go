package body

import (
	"io"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// bodyMemory counts the bytes of request bodies of all pools: their memory is pooled for
// the whole process.
var bodyMemory usage

const (
	// MaxBytes bounds the bytes of request bodies that a pool keeps in memory.
	MaxBytes = 2 << 30
	// alwaysRoom is the longest body, in bytes, that may always be read.
	alwaysRoom = 512 << 10
	// checkEvery is the least time between two checks of the memory in use.
	checkEvery = 9 * time.Second
)

// Memory counts and bounds the bytes of the request bodies that a pool has in memory.
type Memory struct {
	Held atomic.Int64

	mu      sync.Mutex
	uploads map[*upload]struct{} // those that need more than one read
}

// HasRoom returns whether a body of a length may be read into memory.
func (m *Memory) HasRoom(length int64) bool {
	return length <= alwaysRoom || m.Held.Load()+length <= MaxBytes
}

// Reserve counts n bytes that the caller uses until it calls release. It returns whether
// they are within the bound.
func (m *Memory) Reserve(n int64) (within bool, release func()) {
	return m.Held.Add(n) <= MaxBytes, func() { m.Held.Add(-n) }
}

// Count counts the memory of a buffer until it is freed.
func (m *Memory) Count(b *Buffer) { b.count(&m.Held) }

// Upkeep ends slow uploads if memory is short, and returns their number. After a burst it
// returns unused memory to the system. The pool calls it every ten seconds.
func (m *Memory) Upkeep(t time.Time) (ended int) {
	ended = m.endSlow(m.Held.Load() > MaxBytes/2)
	if bodyMemory.fell(t) {
		// An idle process collects garbage only every two minutes. A sync.Pool keeps its
		// memory over one collection: this makes two.
		runtime.GC()
		debug.FreeOSMemory()
	}
	return ended
}

// worthReturning is the least fall, in bytes, after which memory returns to the system.
const worthReturning = 64 << 20

// usage counts bytes in use and notices the end of a burst.
type usage struct {
	used atomic.Int64
	peak atomic.Int64 // of used, since the last check

	mu      sync.Mutex
	checked time.Time
	last    int64 // peak at the last check
	high    int64 // the highest peak since memory was last returned
}

// add counts n more bytes, or fewer if n is negative.
func (u *usage) add(n int64) {
	used := u.used.Add(n)
	for peak := u.peak.Load(); used > peak && !u.peak.CompareAndSwap(peak, used); {
		peak = u.peak.Load()
	}
}

// fell returns whether a burst has ended: for two checks, at most half of the highest peak
// was in use, and at least worthReturning less. It then counts from there: one burst is
// reported once, and steady traffic never. All pools call it; only one call in checkEvery
// checks.
func (u *usage) fell(t time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if t.Sub(u.checked) < checkEvery {
		return false
	}
	peak := u.peak.Swap(u.used.Load())
	recent := max(peak, u.last)
	u.checked, u.last, u.high = t, peak, max(u.high, peak)
	if recent > u.high/2 || u.high-recent < worthReturning {
		return false
	}
	u.high = recent
	return true
}

// Between two checks, a slow upload receives less than leastReceived bytes, and less than
// one slowShare-th of all that it has received. Holding memory then costs a client traffic:
// to hold 2 GiB it must send 3 MB/s.
const (
	leastReceived = 10 << 10
	slowShare     = 64
)

// upload is one request body while it is read into memory.
type upload struct {
	io.ReadCloser
	of       *Memory
	request  *http.Request
	received atomic.Int64 // bytes
	begun    bool         // the first read has begun

	// guarded by of.mu
	listed  bool
	checked bool
	seen    int64 // received at the last check
	ended   bool  // it was slow
}

// Read reads the body of a request of at most limit bytes into memory. A longer body, or one
// for which there is no room, is returned as rest. The error of a slow upload that was ended
// is os.ErrDeadlineExceeded.
func (m *Memory) Read(r *http.Request, limit int64) (all *Buffer, rest *Once, err error) {
	if r.ContentLength >= 0 && r.ContentLength < firstRead {
		return readBody(r.Body, r.ContentLength, limit, &m.Held) // it needs less memory than its connection
	}
	up := &upload{ReadCloser: r.Body, of: m, request: r}
	all, rest, err = readBody(up, r.ContentLength, limit, &m.Held)
	if up.leave() {
		// It may have become whole just before its connection got a deadline.
		if all != nil {
			all.free()
		}
		rest.Done()
		return nil, nil, os.ErrDeadlineExceeded
	}
	if rest != nil {
		rest.ReadCloser = r.Body
	}
	return all, rest, err
}

func (up *upload) Read(p []byte) (int, error) {
	if up.begun && !up.listed {
		up.of.add(up)
	}
	up.begun = true
	n, err := up.ReadCloser.Read(p)
	up.received.Add(int64(n))
	return n, err
}

func (m *Memory) add(up *upload) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.uploads == nil {
		m.uploads = make(map[*upload]struct{})
	}
	m.uploads[up] = struct{}{}
	up.listed = true
}

// leave takes the upload off the list, and returns whether it was ended for being slow. Its
// request must not return before.
func (up *upload) leave() (ended bool) {
	if !up.listed {
		return false
	}
	up.of.mu.Lock()
	defer up.of.mu.Unlock()
	delete(up.of.uploads, up)
	return up.ended
}

// endSlow checks all uploads. If memory is short, it ends those that were slow since the
// last check, and returns their number.
func (m *Memory) endSlow(short bool) (ended int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for up := range m.uploads {
		received := up.received.Load()
		slow := up.checked && received-up.seen < max(leastReceived, received/slowShare)
		up.checked, up.seen = true, received
		if short && slow && !up.ended && up.end() {
			ended++
		}
	}
	return ended
}

// end ends the upload's present read and all further ones. It returns whether it could,
// which needs Caddy's read_idle_timeout (on by default). The caller holds the list's lock,
// so the request does not return meanwhile: its connection may then serve another request.
func (up *upload) end() bool {
	body, _ := caddyhttp.IdleTimeoutsFromContext(up.request.Context())
	up.ended = body != nil && body.SetReadDeadline(time.Unix(1, 0)) == nil
	return up.ended
}
