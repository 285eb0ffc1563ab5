package body

import (
	"io"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// MaxBytes returns the bound of the bytes of request bodies that a pool keeps in memory. It is 2 GiB,
// or a quarter of the process's memory limit if that is less. Caddy sets the limit before it loads a
// configuration, to GOMEMLIMIT or to nine tenths of the memory of the container or machine.
var MaxBytes = sync.OnceValue(func() int64 { return min(2<<30, debug.SetMemoryLimit(-1)/4) })

// shortBody is the longest body, in bytes, that is read above MaxBytes: until half as much again is
// in memory.
const shortBody = 512 << 10

// hasRoom returns whether size bytes more may be in memory beside those that are.
func hasRoom(held *atomic.Int64, size int64) bool {
	most := MaxBytes()
	if size <= shortBody {
		most += most / 2
	}
	return held.Load()+size <= most
}

// Memory counts and bounds the bytes of the request bodies that a pool has in memory.
type Memory struct{ Held atomic.Int64 }

// HasRoom returns whether a body of a length may be read into memory.
func (m *Memory) HasRoom(length int64) bool { return hasRoom(&m.Held, length) }

// Reserve counts n bytes that the caller uses until it calls release. It returns whether
// they are within the bound.
func (m *Memory) Reserve(n int64) (within bool, release func()) {
	return m.Held.Add(n) <= MaxBytes(), func() { m.Held.Add(-n) }
}

// Count counts the memory of a buffer until it is freed.
func (m *Memory) Count(b *Buffer) { b.count(&m.Held) }

// Read reads a body of at most limit bytes into memory. A longer body, or one for which there is no
// room, is returned as rest. length is its Content-Length, negative if unknown.
func (m *Memory) Read(body io.ReadCloser, length, limit int64) (all *Buffer, rest *Once, err error) {
	return readBody(body, length, limit, &m.Held)
}
