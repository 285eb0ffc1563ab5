package body

import (
	"errors"
	"io"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
)

const (
	// firstRead is the memory, in bytes, for a body before its first byte. A
	// Content-Length costs nothing: memory grows with the bytes that arrive.
	firstRead = 16 << 10
	// longRead is the size, in bytes, from which memory doubles. Below it grows
	// fourfold, which copies less.
	longRead = 512 << 10
)

// Read reads a body of at most limit bytes into memory: all. If the body is longer, or there is no room for
// it, the caller gets rest, which reads all of it once. The memory is at most four times the bytes that
// arrived, or firstRead. length is the Content-Length, negative if unknown.
func (m *Memory) Read(body io.ReadCloser, length, limit int64) (all *Buffer, rest *Once, err error) {
	size := int64(firstRead)
	if length >= 0 {
		size = min(length+1, firstRead) // with one byte more, EOF is read without growing
	}
	b := NewBuffer(size)
	m.Count(b)
	for {
		n, err := body.Read(b.Data[len(b.Data):cap(b.Data)])
		b.Data = b.Data[:len(b.Data)+n]
		if errors.Is(err, io.EOF) {
			return b, nil, nil
		}
		if err != nil {
			b.free()
			return nil, nil, err
		}
		if int64(len(b.Data)) > limit {
			return nil, restOf(b, body, false), nil
		}
		if len(b.Data) == cap(b.Data) {
			grown := grow(int64(cap(b.Data)), length, limit)
			if !m.HasRoom(grown) {
				return nil, restOf(b, body, true), nil
			}
			larger := NewBuffer(grown)
			m.Count(larger)
			larger.Data = append(larger.Data, b.Data...)
			b.free()
			b = larger
		}
	}
}

// grow returns the size of the memory that replaces a full one of size bytes.
func grow(size, length, limit int64) int64 {
	grown := size * 2
	if size < longRead {
		grown = size * 4
	}
	if length > 0 {
		grown = min(grown, length+1)
	}
	return max(min(grown, limit+1), size+1)
}

func restOf(b *Buffer, body io.ReadCloser, noRoom bool) *Once {
	o := &Once{ReadCloser: body, left: b.Data, began: true, NoRoom: noRoom}
	o.begun.Store(b)
	return o
}

// EventStream is the media type of a stream of server-sent events.
const EventStream = "text/event-stream"

// MediaType returns the media type that a header declares, in lower case and without its
// parameters; empty if it declares none.
func MediaType(h http.Header) string {
	kind, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	return strings.ToLower(strings.TrimSpace(kind))
}

// IsJSON returns whether a media type is that of JSON.
func IsJSON(kind string) bool {
	return kind == "application/json" || strings.HasSuffix(kind, "+json")
}

// IsForm returns whether a media type is that of a form.
func IsForm(kind string) bool {
	return kind == "multipart/form-data" || kind == "application/x-www-form-urlencoded"
}

// Compressed returns whether a header declares a content encoding.
func Compressed(h http.Header) bool {
	coding := strings.TrimSpace(h.Get("Content-Encoding"))
	return coding != "" && !strings.EqualFold(coding, "identity")
}

// Lazy is the proxy's body of a request. The transport opens the body for each attempt by
// itself, so Lazy opens it only if another handler reads it.
type Lazy struct {
	mu   sync.Mutex // the proxy may still read during Release
	Of   *Replay
	open io.ReadCloser
}

// Release closes the reader that Read opened. Further reads return an error.
func (l *Lazy) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Of = nil
	if l.open != nil {
		_ = l.open.Close()
	}
}

func (l *Lazy) Read(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		if l.Of == nil {
			return 0, http.ErrBodyReadAfterClose
		}
		l.open = l.Of.open()
	}
	return l.open.Read(p) // it is in memory
}

func (l *Lazy) Close() error { return nil }

// Once is a body that can be sent only once, as the router streams it through.
type Once struct {
	io.ReadCloser
	begun   atomic.Pointer[Buffer] // what the router has read; nil if nothing, or no longer needed
	left    []byte                 // the unsent part of that
	began   bool                   // the router has read some
	NoRoom  bool                   // there was no room for more
	Touched atomic.Bool            // an attempt has read from it
	Failed  atomic.Bool            // a read failed
}

// Begun returns what the router has read and no attempt has sent. It is valid until the next Read.
func (o *Once) Begun() []byte { return o.left }

// Done stops counting the memory of what the router has read. A reader may still use it, so
// the memory does not return to its pool.
func (o *Once) Done() {
	if o == nil {
		return
	}
	if b := o.begun.Swap(nil); b != nil {
		b.uncount()
	}
}

func (o *Once) Read(p []byte) (int, error) {
	o.Touched.Store(true)
	if len(o.left) > 0 {
		n := copy(p, o.left)
		if o.left = o.left[n:]; len(o.left) == 0 {
			o.left = nil
			o.Done()
		}
		return n, nil
	}
	n, err := o.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		o.Failed.Store(true)
	}
	return n, err
}

// MaxBytes returns the bound of the bytes of request bodies that a pool keeps in memory. It is 2 GiB,
// or a quarter of the process's memory limit if that is less. Caddy sets the limit before it loads a
// configuration, to GOMEMLIMIT or to nine tenths of the memory of the container or machine.
var MaxBytes = sync.OnceValue(func() int64 { return min(2<<30, debug.SetMemoryLimit(-1)/4) })

// shortBody is the longest body, in bytes, that is read above MaxBytes: until half as much again is
// in memory.
const shortBody = 512 << 10

// Memory counts and bounds the bytes of the request bodies that a pool has in memory.
type Memory struct{ Held atomic.Int64 }

// HasRoom returns whether a body of a length, in bytes, may be read into memory.
func (m *Memory) HasRoom(length int64) bool {
	most := MaxBytes()
	if length <= shortBody {
		most += most / 2
	}
	return m.Held.Load()+length <= most
}

// Reserve counts n bytes that the caller uses until it calls release. It returns whether
// they are within the bound.
func (m *Memory) Reserve(n int64) (within bool, release func()) {
	return m.Held.Add(n) <= MaxBytes(), func() { m.Held.Add(-n) }
}

// Count counts the memory of a buffer until it is freed.
func (m *Memory) Count(b *Buffer) {
	b.held, b.size = &m.Held, int64(cap(b.Data))
	b.held.Add(b.size)
}
