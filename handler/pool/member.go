package pool

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// Member is one configuration's way to its workers.
type Member interface {
	// Reaches returns whether a worker is one of the configuration's.
	Reaches(w *Worker) bool
	// Call posts a body to a worker, as a request of the router's own.
	Call(ctx context.Context, w *Worker, path string, body []byte) (status int, answer []byte, err error)
}

// joined are the configurations that have joined a pool, the newest last.
type joined struct {
	mu   sync.Mutex
	list []*membership
}

// membership is a configuration in a pool. One that has ended stays until the next one joins: sessions
// are left to be closed at its workers.
type membership struct {
	Member
	left bool
}

// Join adds a configuration to the pool, until it calls leave.
func (p *Pool) Join(m Member) (leave func()) {
	j, one := &p.joined, &membership{Member: m}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.list = append(slices.DeleteFunc(j.list, func(m *membership) bool { return m.left }), one)
	return func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		one.left = true
	}
}

var errNoMember = errors.New("no configuration has the worker")

// Call posts a body to a worker by the newest configuration that has it.
func (p *Pool) Call(ctx context.Context, w *Worker, path string, body []byte) (status int, answer []byte, err error) {
	p.joined.mu.Lock()
	list := slices.Clone(p.joined.list)
	p.joined.mu.Unlock()
	for _, m := range slices.Backward(list) {
		if m.Reaches(w) {
			return m.Call(ctx, w, path, body)
		}
	}
	return 0, nil, errNoMember
}
