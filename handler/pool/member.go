package pool

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// Join adds a configuration to the pool, until it calls leave.
func (p *Pool) Join(m Member) (leave func()) {
	one := &membership{Member: m}
	p.joined.mu.Lock()
	p.joined.list = append(p.joined.list, one)
	p.joined.mu.Unlock()
	p.pruneMembers(time.Now())
	return sync.OnceFunc(func() {
		p.joined.mu.Lock()
		one.left = time.Now()
		p.joined.mu.Unlock()
		p.pruneMembers(time.Now())
	})
}

// way returns the configuration by which the router reaches a worker: the newest, or the one that
// ended last if all have ended. nil: there is none. The caller holds the lock.
func (j *joined) way(w *worker.Worker) (m *membership) {
	for _, one := range slices.Backward(j.list) {
		switch {
		case !one.Reaches(w):
		case one.left.IsZero():
			return one
		case m == nil || one.left.After(m.left):
			m = one
		}
	}
	return m
}

// pruneMembers forgets the configurations that have ended and are no worker's only way.
func (p *Pool) pruneMembers(t time.Time) {
	workers := p.All()
	p.joined.mu.Lock()
	defer p.joined.mu.Unlock()
	needed := make(map[*membership]bool)
	for _, w := range workers {
		needed[p.joined.way(w)] = true
	}
	p.joined.list = slices.DeleteFunc(p.joined.list, func(m *membership) bool {
		return !m.left.IsZero() && (!needed[m] || t.Sub(m.left) > WorkerGrace)
	})
}

var errNoMember = errors.New("no configuration has the worker")

// Call posts a body to a worker by a configuration that has it.
func (p *Pool) Call(ctx context.Context, w *worker.Worker, path string, body []byte) (status int, answer []byte, err error) {
	p.joined.mu.Lock()
	m := p.joined.way(w)
	p.joined.mu.Unlock()
	if m == nil {
		return 0, nil, errNoMember
	}
	return m.Call(ctx, w, path, body)
}
