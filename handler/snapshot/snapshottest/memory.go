// Package snapshottest has a storage for the tests of snapshots.
package snapshottest

import (
	"context"
	"io/fs"
	"slices"
	"sync"
)

// Memory is a storage in memory, which can fail and hang. The zero value is empty. A test may
// read and change its fields while nothing else uses it.
type Memory struct {
	Values map[string][]byte
	Fails  error // the error of Store

	mu     sync.Mutex
	stores int
	hangs  <-chan struct{}
}

// Hang makes further calls of Load and Store wait until the channel is closed. Others may be
// under way.
func (m *Memory) Hang(until <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hangs = until
}

func (m *Memory) wait() {
	m.mu.Lock()
	hangs := m.hangs
	m.mu.Unlock()
	if hangs != nil {
		<-hangs
	}
}

// Load returns a copy of a value, or fs.ErrNotExist.
func (m *Memory) Load(_ context.Context, key string) ([]byte, error) {
	m.wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if v, ok := m.Values[key]; ok {
		return slices.Clone(v), nil
	}
	return nil, fs.ErrNotExist
}

// Store stores a copy of a value.
func (m *Memory) Store(_ context.Context, key string, value []byte) error {
	m.wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stores++; m.Fails != nil {
		return m.Fails
	}
	if m.Values == nil {
		m.Values = make(map[string][]byte)
	}
	m.Values[key] = slices.Clone(value)
	return nil
}

// Delete removes a value.
func (m *Memory) Delete(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.Values, key)
	return nil
}

// Count returns the number of calls of Store.
func (m *Memory) Count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stores
}
