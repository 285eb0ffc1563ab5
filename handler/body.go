package handler

import (
	"bytes"
	"io"
	"math/bits"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
)

// small is the size up to which a body is sent by a reader that net/http knows
// to be in memory, which saves it a write and a copy. Longer ones have readers
// of ours, which say when they are done with the memory.
const small = 64 << 10

// buffer is memory for one body. That of long ones is used again: the garbage
// collector would otherwise be the largest part of what they cost.
type buffer struct {
	data []byte
	pool *sync.Pool // where it goes back to; nil if it does not
}

// classes are the sizes of memory that is used again: small << class bytes.
const classes = 7 // 64 KiB to 4 MiB

var buffers [classes]sync.Pool

// newBuffer returns an empty buffer with room for size bytes.
func newBuffer(size int64) *buffer {
	class := bits.Len64(uint64(max(size-1, 0) / small))
	if size <= small || class >= classes {
		return &buffer{data: make([]byte, 0, size)}
	}
	pool := &buffers[class]
	if b, ok := pool.Get().(*buffer); ok {
		return b
	}
	return &buffer{data: make([]byte, 0, small<<class), pool: pool}
}

// free gives the memory back. Nobody may use it any more.
func (b *buffer) free() {
	if b.pool != nil {
		b.data = b.data[:0]
		b.pool.Put(b)
	}
}

// replay is a body in memory, or none, that can be sent again and again. Its
// memory is used for another one when whoever made it has let go of it and all
// its readers were closed.
type replay struct {
	parts  [][]byte
	size   int64
	buffer *buffer
	users  atomic.Int32
}

// replayOf returns the body that consists of parts of the buffer, which may be
// nil.
func replayOf(b *buffer, parts ...[]byte) *replay {
	r := &replay{buffer: b}
	r.users.Store(1)
	for _, p := range parts {
		r.size += int64(len(p))
	}
	switch {
	case len(parts) == 1 || r.size > small:
		r.parts = parts
	case r.size > 0:
		r.parts = [][]byte{slices.Concat(parts...)}
	}
	return r
}

// done lets go of the body: its maker, or one of its readers, needs it no more.
func (b *replay) done() {
	if b.users.Add(-1) != 0 {
		return
	}
	// net/http keeps the request, and that this body, as long as the answer
	memory := b.buffer
	b.parts, b.buffer = nil, nil
	if memory != nil {
		memory.free()
	}
}

// open returns the body from its first byte. It must not be called by others
// than the maker, and not after done.
func (b *replay) open() io.ReadCloser {
	switch {
	case b.size == 0:
		return http.NoBody
	case b.size <= small && (b.buffer == nil || b.buffer.pool == nil):
		return io.NopCloser(bytes.NewReader(b.parts[0]))
	}
	b.users.Add(1)
	return &replayReader{of: b, parts: b.parts}
}

// replayReader reads a body. net/http may close it while it reads, and closes
// it for certain.
type replayReader struct {
	mu    sync.Mutex
	of    *replay // nil once closed
	parts [][]byte
	at    int // in parts[0]
}

// Read implements io.Reader.
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

// Close implements io.Closer.
func (r *replayReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of != nil {
		r.of.done()
		r.of, r.parts = nil, nil
	}
	return nil
}
