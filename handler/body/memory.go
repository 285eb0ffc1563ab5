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

// HasRoom tells whether a body of a length may be read into memory. Short ones
// always may.
func (m *Memory) HasRoom(length int64) bool {
	return length <= alwaysRoom || m.Held.Load()+length <= MaxBytes
}

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
		// An idle process would collect garbage only every two minutes, and a
		// sync.Pool keeps its memory over one collection: this makes two.
		runtime.GC()
		debug.FreeOSMemory()
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

// An upload is slow if it received less than leastReceived bytes, and less than
// one slowShare-th of what it has received in all, between two looks. Memory
// then costs its holder traffic: who holds 2 GiB must send 3 MB/s.
const (
	leastReceived = 10 << 10
	slowShare     = 64
)

// uploads are a pool's request bodies that are being read into memory and did
// not arrive with their first read.
type uploads struct {
	mu  sync.Mutex
	all map[*upload]struct{}
}

// upload is one request body while it is read into memory.
type upload struct {
	io.ReadCloser
	of       *uploads
	request  *http.Request
	received atomic.Int64 // bytes
	begun    bool         // it was read from

	// of.mu guards these
	listed bool
	looked bool
	seen   int64 // received as of the last look
	ended  bool  // it was slow
}

// Read reads the body of a request of at most limit bytes into memory. It returns a
// longer body as a stream, and one for which there is no room. The error of a slow
// upload that was ended is os.ErrDeadlineExceeded.
func (m *Memory) Read(r *http.Request, limit int64) (all *Buffer, rest *Stream, err error) {
	return m.uploads.read(r, limit, &m.Held)
}

func (u *uploads) read(r *http.Request, limit int64, held *atomic.Int64) (all *Buffer, rest *Stream, err error) {
	if r.ContentLength >= 0 && r.ContentLength < firstRead {
		return readBody(r.Body, r.ContentLength, limit, held) // whose memory is less than its connection's
	}
	up := &upload{ReadCloser: r.Body, of: u, request: r}
	all, rest, err = readBody(up, r.ContentLength, limit, held)
	if up.leave() {
		// It may have been whole just before its connection got a deadline.
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

func (u *uploads) add(up *upload) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.all == nil {
		u.all = make(map[*upload]struct{})
	}
	u.all[up] = struct{}{}
	up.listed = true
}

// leave takes the upload off the list and reports whether it was ended for being
// slow. Its request must not return before.
func (up *upload) leave() (ended bool) {
	if !up.listed {
		return false
	}
	up.of.mu.Lock()
	defer up.of.mu.Unlock()
	delete(up.of.all, up)
	return up.ended
}

// endSlow looks at all uploads. If memory is short, it ends those that were slow
// since the last look, and returns how many. While there is memory, slow uploads
// go on.
func (u *uploads) endSlow(short bool) (ended int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for up := range u.all {
		received := up.received.Load()
		slow := up.looked && received-up.seen < max(leastReceived, received/slowShare)
		up.looked, up.seen = true, received
		if short && slow && !up.ended && up.end() {
			ended++
		}
	}
	return ended
}

// end ends the read that the upload waits in, and all further ones. It reports
// whether it could: it needs Caddy's read_idle_timeout, which is on by default.
// The list's lock is held, so that the request does not return meanwhile: its
// connection may then be another request's.
func (up *upload) end() bool {
	body, _ := caddyhttp.IdleTimeoutsFromContext(up.request.Context())
	up.ended = body != nil && body.SetReadDeadline(time.Unix(1, 0)) == nil
	return up.ended
}
