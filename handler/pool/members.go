package pool

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// Member is one configuration's way to its workers.
type Member interface {
	// Reaches returns whether a worker is one of the configuration's. The pool holds a
	// lock.
	Reaches(w *worker.Worker) bool
	// Call posts a body to a worker, as a request of the router's own.
	Call(ctx context.Context, w *worker.Worker, path string, body []byte) (status int, answer []byte, err error)
}

// members are the configurations that have joined a pool, the newest last.
type members struct {
	workers *registry

	mu   sync.Mutex
	list []*membership
}

// membership is a configuration in a pool. One that has ended stays for WorkerGrace if it is
// the only way to a worker, because sessions are left to be closed there.
type membership struct {
	Member
	left time.Time // zero: the configuration has not ended
}

// Join adds a configuration to the pool, until it calls leave.
func (m *members) Join(by Member) (leave func()) {
	one := &membership{Member: by}
	m.mu.Lock()
	m.list = append(m.list, one)
	m.mu.Unlock()
	m.prune(time.Now())
	return sync.OnceFunc(func() {
		m.mu.Lock()
		one.left = time.Now()
		m.mu.Unlock()
		m.prune(time.Now())
	})
}

// way returns the configuration by which the router reaches a worker: the newest, or the one that
// ended last if all have ended. nil: there is none. The caller holds the lock.
func (m *members) way(w *worker.Worker) (way *membership) {
	for _, one := range slices.Backward(m.list) {
		switch {
		case !one.Reaches(w):
		case one.left.IsZero():
			return one
		case way == nil || one.left.After(way.left):
			way = one
		}
	}
	return way
}

// prune forgets the configurations that have ended and are no worker's only way.
func (m *members) prune(t time.Time) {
	workers := m.workers.All()
	m.mu.Lock()
	defer m.mu.Unlock()
	needed := make(map[*membership]bool)
	for _, w := range workers {
		needed[m.way(w)] = true
	}
	m.list = slices.DeleteFunc(m.list, func(one *membership) bool {
		return !one.left.IsZero() && (!needed[one] || t.Sub(one.left) > WorkerGrace)
	})
}

// Call posts a body to a worker by a configuration that has it.
func (m *members) Call(ctx context.Context, w *worker.Worker, path string, body []byte) (status int, answer []byte, err error) {
	m.mu.Lock()
	way := m.way(w)
	m.mu.Unlock()
	if way == nil {
		return 0, nil, errors.New("no configuration has the worker")
	}
	return way.Call(ctx, w, path, body)
}
