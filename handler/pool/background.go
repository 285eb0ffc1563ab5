package pool

import (
	"slices"
	"sync"
	"sync/atomic"
)

const (
	// maxBackground and maxBackgroundWorker bound the router's own requests beside clients'
	// requests, in a pool and on one worker.
	maxBackground, maxBackgroundWorker = 64, 2
	// maxBackgroundBytes bounds the memory that future ones reserve.
	maxBackgroundBytes = 256 << 20
)

// backgrounds are the router's own requests that run beside clients' requests, and give
// way to them.
type backgrounds struct {
	kept atomic.Int64 // bytes that future ones reserve

	mu      sync.Mutex
	running []*background
}

type background struct {
	worker *Worker
	stop   func()
}

// Keep reserves n bytes for a future request, until the caller calls Drop. It returns
// false if there is no room for them.
func (b *backgrounds) Keep(n int64) bool {
	if b.kept.Add(n) > maxBackgroundBytes {
		b.kept.Add(-n)
		return false
	}
	return true
}

// Drop ends a reservation by Keep.
func (b *backgrounds) Drop(n int64) { b.kept.Add(-n) }

// Count returns how many requests run.
func (b *backgrounds) Count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.running)
}

// Background registers a request of the router's own that runs on a worker until done is
// called. It returns false if there are too many. If a client's request needs the worker,
// the pool calls stop, which must return after the request has ended.
func (p *Pool) Background(w *Worker, stop func()) (done func(), ok bool) {
	b := &p.Backgrounds
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.running) >= maxBackground || w.background.Load() >= maxBackgroundWorker {
		return nil, false
	}
	one := &background{w, stop}
	b.running = append(b.running, one)
	w.background.Add(1)
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if i := slices.Index(b.running, one); i >= 0 {
			b.running = slices.Delete(b.running, i, i+1)
			w.background.Add(-1)
		}
	}, true
}

// Yield stops the router's own requests on a worker, and returns whether there were any.
func (p *Pool) Yield(w *Worker) bool {
	if w.background.Load() == 0 {
		return false
	}
	var list []*background
	p.Backgrounds.mu.Lock()
	for _, b := range p.Backgrounds.running {
		if b.worker == w {
			list = append(list, b)
		}
	}
	p.Backgrounds.mu.Unlock()
	for _, b := range list {
		b.stop()
	}
	return len(list) > 0
}
