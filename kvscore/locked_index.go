package kvscore

import (
	"sync"

	"github.com/caddy-kvrouter/kvrouter/kvscore/index"
)

// lockedIndex is the approximate cache models with a lock of their own: requests match their
// prompts while others are booked. All changes also need the scheduler's lock. A reader that
// holds that lock needs no other.
type lockedIndex struct {
	mu sync.RWMutex
	of *index.Index
}

// Match locks out changes only.
func (m *lockedIndex) Match(c *index.Chain, to *index.Match) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	m.of.Match(c, to)
}

func (m *lockedIndex) change(by func(*index.Index)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	by(m.of)
}

// AcquireMatched is index.Index.AcquireMatched.
func (m *lockedIndex) AcquireMatched(slot int, c *index.Chain, matched int) (index.Ref, int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.of.AcquireMatched(slot, c, matched)
}

// Release is index.Index.Release.
func (m *lockedIndex) Release(ref index.Ref, keep bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.of.Release(ref, keep)
}

// Touch is index.Index.Touch.
func (m *lockedIndex) Touch(slot int, c *index.Chain, tokens int64) {
	m.change(func(x *index.Index) { x.Touch(slot, c, tokens) })
}

// SetCapacity is index.Index.SetCapacity.
func (m *lockedIndex) SetCapacity(slot int, tokens int64) {
	m.change(func(x *index.Index) { x.SetCapacity(slot, tokens) })
}

// SetMemory is index.Index.SetMemory.
func (m *lockedIndex) SetMemory(bytes int64) { m.change(func(x *index.Index) { x.SetMemory(bytes) }) }

// Clear is index.Index.Clear.
func (m *lockedIndex) Clear(slot int) { m.change(func(x *index.Index) { x.Clear(slot) }) }

// RecordCached is index.Index.RecordCached.
func (m *lockedIndex) RecordCached(ref index.Ref, blocks int, tokens float64) {
	m.change(func(x *index.Index) { x.RecordCached(ref, blocks, tokens) })
}

// RecordCount is index.Index.RecordCount.
func (m *lockedIndex) RecordCount(ref index.Ref, c *index.Chain, tokens int64) {
	m.change(func(x *index.Index) { x.RecordCount(ref, c, tokens) })
}

// Restore is index.Index.Restore.
func (m *lockedIndex) Restore(slot int, c *index.Held) {
	m.change(func(x *index.Index) { x.Restore(slot, c) })
}

// Step is index.Index.Step.
func (m *lockedIndex) Step(work int) (more bool) {
	m.change(func(x *index.Index) { more = x.Step(work) })
	return more
}

// Used is index.Index.Used.
func (m *lockedIndex) Used(slot int) int64 { return m.of.Used(slot) }

// InUse is index.Index.InUse.
func (m *lockedIndex) InUse(slot int) int64 { return m.of.InUse(slot) }

// Idle is index.Index.Idle.
func (m *lockedIndex) Idle(slot int) bool { return m.of.Idle(slot) }

// Blocks is index.Index.Blocks.
func (m *lockedIndex) Blocks() int64 { return m.of.Blocks() }

// Bytes is index.Index.Bytes.
func (m *lockedIndex) Bytes() int64 { return m.of.Bytes() }
