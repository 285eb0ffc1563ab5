// Package body keeps request bodies in memory: bounded, pooled, sent as often as needed,
// and edited by splices. It does not know what they say.
package body

import (
	"bytes"
	"errors"
	"io"
	"math/bits"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// small is the size up to which a body is sent by a reader that net/http recognizes as
// memory. The body then goes out in one write with the header. Longer bodies have readers
// of this package, which report when they no longer use the memory. Conn sends them
// without a copy.
const small = 3 << 10

// Buffer is memory for one body. Long buffers are pooled: collecting them as garbage would
// be the largest part of their cost.
type Buffer struct {
	Data []byte
	pool *sync.Pool    // that it returns to; nil if it is not pooled
	held *atomic.Int64 // counts its bytes; nil if nothing does
	size int64         // that is counted there
}

// classes are the sizes of pooled memory: leastPooled << class bytes, up to 4 MiB.
const (
	leastPooled = 4 << 10
	classes     = 11
)

var buffers [classes]sync.Pool

// NewBuffer returns an empty buffer with room for size bytes.
func NewBuffer(size int64) *Buffer {
	class := bits.Len64(uint64(max(size-1, 0) / leastPooled))
	if size <= small || class >= classes {
		return &Buffer{Data: make([]byte, 0, size)}
	}
	pool := &buffers[class]
	if b, ok := pool.Get().(*Buffer); ok {
		return b
	}
	return &Buffer{Data: make([]byte, 0, leastPooled<<class), pool: pool}
}

func (b *Buffer) uncount() {
	if b.held != nil {
		b.held.Add(-b.size)
		b.held = nil
	}
}

// free returns the memory to its pool. Nothing may use it afterwards.
func (b *Buffer) free() {
	b.uncount()
	if b.pool != nil {
		b.Data = b.Data[:0]
		b.pool.Put(b)
	}
}

// Replay is a body in memory, possibly empty, that can be sent again and again. The memory
// returns to its pool once the owner has called Done and all readers are closed.
type Replay struct {
	Data   []byte
	Size   int64
	Buffer *Buffer // that Data is in; may be nil
	users  atomic.Int32
}

// NewReplay returns the body data. The buffer that data is in may be nil.
func NewReplay(b *Buffer, data []byte) *Replay {
	r := &Replay{Data: data, Size: int64(len(data)), Buffer: b}
	r.users.Store(1)
	return r
}

// Done says that the owner, or a reader, no longer needs the body. It may be nil.
func (b *Replay) Done() {
	if b == nil || b.users.Add(-1) != 0 {
		return
	}
	// net/http keeps the request, and so this body, as long as the answer
	memory := b.Buffer
	b.Data, b.Buffer = nil, nil
	if memory != nil {
		memory.free()
	}
}

// inMemory returns whether a reader that net/http recognizes sends the body: the body is
// small and its memory is not pooled.
func (b *Replay) inMemory() bool {
	return b.Size <= small && (b.Buffer == nil || b.Buffer.pool == nil)
}

// open returns the body from its first byte. Only the owner may call it, before Done.
func (b *Replay) open() io.ReadCloser { return Edited{Of: b, Size: b.Size}.Open() }

// replayReader reads a body. net/http may close it during a Read, and always closes it.
type replayReader struct {
	mu   sync.Mutex
	of   *Replay     // nil once closed
	rest net.Buffers // unread
}

func (r *replayReader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil {
		return 0, http.ErrBodyReadAfterClose
	}
	return r.rest.Read(p)
}

// sendTo writes the unread bytes to a connection, without a copy.
func (r *replayReader) sendTo(conn net.Conn) (int64, error) {
	r.mu.Lock()
	if r.of == nil {
		r.mu.Unlock()
		return 0, http.ErrBodyReadAfterClose
	}
	body := r.of
	body.users.Add(1) // the reader may be closed during the write
	rest := r.rest
	r.rest = nil
	r.mu.Unlock()
	defer body.Done()
	return rest.WriteTo(conn)
}

func (r *replayReader) left() (n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.rest {
		n += int64(len(p))
	}
	return n
}

func (r *replayReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of != nil {
		r.of.Done()
		r.of, r.rest = nil, nil
	}
	return nil
}

// Conn is a connection to a worker. It writes bodies directly from their memory, where
// net/http would copy them through a buffer.
type Conn struct{ net.Conn }

func (c Conn) ReadFrom(r io.Reader) (int64, error) {
	if limited, ok := r.(*io.LimitedReader); ok {
		if body, ok := limited.R.(*replayReader); ok && limited.N >= body.left() {
			n, err := body.sendTo(c.Conn)
			limited.N -= n
			return n, err
		}
	}
	if from, ok := c.Conn.(io.ReaderFrom); ok {
		return from.ReadFrom(r)
	}
	return io.Copy(struct{ io.Writer }{c.Conn}, r)
}

// CloseWrite closes one direction of a tunnel, as a TCP connection does.
func (c Conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported // the proxy then closes both
}

// Edited is a body as one attempt sends it: unchanged, or with edits.
type Edited struct {
	Of    *Replay
	parts [][]byte // none is empty; nil if the body is unchanged
	Size  int64
}

// Edit returns the body with edits, which are in order and do not overlap. All other bytes
// are unchanged and are not copied.
func (b *Replay) Edit(edits []rawjson.Edit) Edited {
	s := Edited{Of: b, Size: b.Size}
	if len(edits) == 0 {
		return s
	}
	if b.inMemory() {
		body := rawjson.Splice(nil, b.Data, edits)
		s.parts, s.Size = [][]byte{body}, int64(len(body))
		return s
	}
	at := 0
	s.parts, s.Size = make([][]byte, 0, 2*len(edits)+1), 0
	put := func(p []byte) {
		if len(p) > 0 {
			s.parts = append(s.parts, p)
			s.Size += int64(len(p))
		}
	}
	for _, e := range edits {
		put(b.Data[at:e.Start])
		put(e.Text)
		at = e.End
	}
	put(b.Data[at:])
	return s
}

// Open returns the bytes to send, from the first one. The rules of open apply.
func (s Edited) Open() io.ReadCloser {
	if s.Size == 0 {
		return http.NoBody
	}
	parts := net.Buffers{s.Of.Data}
	if s.parts != nil {
		parts = slices.Clone(s.parts) // reading consumes them
	}
	if s.Of.inMemory() {
		return io.NopCloser(bytes.NewReader(parts[0]))
	}
	s.Of.users.Add(1)
	return &replayReader{of: s.Of, rest: parts}
}
