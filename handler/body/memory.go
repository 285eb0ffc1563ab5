package body

import (
	"net/http"
	"sync/atomic"
)

const (
	// MaxBytes bounds the bytes of request bodies that a pool keeps in memory.
	MaxBytes = 2 << 30
	// alwaysRoom is the longest body, in bytes, that may always be read.
	alwaysRoom = 512 << 10
)

// Memory counts and bounds the bytes of the request bodies that a pool has in memory.
type Memory struct{ Held atomic.Int64 }

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

// Read reads the body of a request of at most limit bytes into memory. A longer body, or one
// for which there is no room, is returned as rest.
func (m *Memory) Read(r *http.Request, limit int64) (all *Buffer, rest *Once, err error) {
	return readBody(r.Body, r.ContentLength, limit, &m.Held)
}
