// Package body keeps request bodies in memory: bounded, pooled, sent as often as needed,
// and edited by splices. It knows nothing of what they say.
package body

import (
	"bytes"
	"io"
	"math/bits"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// small is the size up to which a body is sent by a reader that net/http knows
// to be in memory: it goes out in one write with the header then. Longer ones
// have readers of ours, which say when they are done with the memory, and which
// bodyConn sends without a copy.
const small = 3 << 10

// Buffer is memory for one body. That of long ones is used again: the garbage
// collector would otherwise be the largest part of what they cost.
type Buffer struct {
	Data []byte
	pool *sync.Pool    // where it goes back to; nil if it does not
	held *atomic.Int64 // counts what it takes, in bytes; nil if nobody does
	size int64         // that is counted there
}

// classes are the sizes of memory that is used again: leastPooled << class
// bytes, up to 4 MiB.
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

// count has the memory counted until it is given back.
func (b *Buffer) count(held *atomic.Int64) {
	b.held, b.size = held, int64(cap(b.Data))
	held.Add(b.size)
	bodyMemory.add(b.size)
}

// uncount has it counted no longer.
func (b *Buffer) uncount() {
	if b.held != nil {
		b.held.Add(-b.size)
		bodyMemory.add(-b.size)
		b.held = nil
	}
}

// free gives the memory back. Nobody may use it any more.
func (b *Buffer) free() {
	b.uncount()
	if b.pool != nil {
		b.Data = b.Data[:0]
		b.pool.Put(b)
	}
}

// Replay is a body in memory, or none, that can be sent again and again. Its
// memory is used for another one when whoever made it has let go of it and all
// its readers were closed.
type Replay struct {
	Parts  [][]byte
	Size   int64
	Buffer *Buffer
	users  atomic.Int32
}

// NewReplay returns the body that consists of parts of the buffer, which may be
// nil.
func NewReplay(b *Buffer, parts ...[]byte) *Replay {
	r := &Replay{Buffer: b}
	r.users.Store(1)
	for _, p := range parts {
		r.Size += int64(len(p))
	}
	switch {
	case len(parts) == 1 || r.Size > small:
		r.Parts = parts
	case r.Size > 0:
		r.Parts = [][]byte{slices.Concat(parts...)}
	}
	return r
}

// Done lets go of the body: its maker, or one of its readers, needs it no more.
func (b *Replay) Done() {
	if b.users.Add(-1) != 0 {
		return
	}
	// net/http keeps the request, and that this body, as long as the answer
	memory := b.Buffer
	b.Parts, b.Buffer = nil, nil
	if memory != nil {
		memory.free()
	}
}

// inMemory tells whether the body is sent by a reader that net/http knows: it is
// short, and its memory is not used again.
func (b *Replay) inMemory() bool {
	return b.Size <= small && len(b.Parts) == 1 && (b.Buffer == nil || b.Buffer.pool == nil)
}

// open returns the body from its first byte. It must not be called by others
// than the maker, and not after done.
func (b *Replay) open() io.ReadCloser {
	switch {
	case b.Size == 0:
		return http.NoBody
	case b.inMemory():
		return io.NopCloser(bytes.NewReader(b.Parts[0]))
	}
	b.users.Add(1)
	return &replayReader{of: b, parts: b.Parts}
}

// replayReader reads a body. net/http may close it while it reads, and closes
// it for certain.
type replayReader struct {
	mu    sync.Mutex
	of    *Replay // nil once closed
	parts [][]byte
	at    int // in parts[0]
}

func (r *replayReader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil {
		return 0, http.ErrBodyReadAfterClose
	}
	for len(r.parts) > 0 && r.at == len(r.parts[0]) {
		r.parts, r.at = r.parts[1:], 0
	}
	if len(r.parts) == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.parts[0][r.at:])
	r.at += n
	return n, nil
}

// sendTo writes what was not read yet, without a copy.
func (r *replayReader) sendTo(conn net.Conn) (int64, error) {
	r.mu.Lock()
	if r.of == nil {
		r.mu.Unlock()
		return 0, http.ErrBodyReadAfterClose
	}
	body := r.of
	body.users.Add(1) // the reader may be closed meanwhile
	parts := make(net.Buffers, 0, len(r.parts))
	for i, p := range r.parts {
		if i == 0 {
			p = p[r.at:]
		}
		parts = append(parts, p)
	}
	r.parts = nil
	r.mu.Unlock()
	defer body.Done()
	return parts.WriteTo(conn)
}

// Conn is a connection to a worker that bodies are sent over from where they
// are: net/http would copy them through a buffer that it allocates.
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

// left returns how many bytes were not read yet.
func (r *replayReader) left() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	left := int64(-r.at)
	for _, p := range r.parts {
		left += int64(len(p))
	}
	return left
}

func (r *replayReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of != nil {
		r.of.Done()
		r.of, r.parts = nil, nil
	}
	return nil
}

// Edited is what one attempt sends of a body: the body as it is, or with
// changes.
type Edited struct {
	Of    *Replay
	parts [][]byte // nil: the body as it is
	Size  int64
}

// Edit returns a body, which is one part, with changes, which are in order and
// do not overlap. All other bytes stay, and stay where they are.
func (b *Replay) Edit(edits []rawjson.Edit) Edited {
	s := Edited{Of: b, Size: b.Size}
	if len(edits) == 0 {
		return s
	}
	whole, at := b.Parts[0], 0
	if b.inMemory() {
		body := rawjson.Splice(nil, whole, edits)
		s.parts, s.Size = [][]byte{body}, int64(len(body))
		return s
	}
	s.parts, s.Size = make([][]byte, 0, 2*len(edits)+1), 0
	put := func(p []byte) {
		if len(p) > 0 {
			s.parts = append(s.parts, p)
			s.Size += int64(len(p))
		}
	}
	for _, e := range edits {
		put(whole[at:e.Start])
		put(e.Text)
		at = e.End
	}
	put(whole[at:])
	return s
}

// Open returns what is sent, from its first byte. It must be called as open of
// the body.
func (s Edited) Open() io.ReadCloser {
	switch {
	case s.parts == nil:
		return s.Of.open()
	case s.Of.inMemory():
		return io.NopCloser(bytes.NewReader(s.parts[0]))
	}
	s.Of.users.Add(1)
	return &replayReader{of: s.Of, parts: s.parts}
}
