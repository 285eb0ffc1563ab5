package pool

import "sync"

// maxBackground and maxBackgroundWorker bound the router's own requests beside clients'
// requests, in a pool and on one worker.
const maxBackground, maxBackgroundWorker = 64, 2

// background bounds the router's own requests that run beside clients' requests. The zero
// value is ready.
type background struct {
	mu      sync.Mutex
	running int
	on      map[*Worker]int // how many run on each worker
}

// Running returns how many requests run.
func (b *background) Running() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.running
}

// Begin registers a request on a worker, until the caller calls End. It returns false if
// there are too many.
func (b *background) Begin(w *Worker) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running >= maxBackground || b.on[w] >= maxBackgroundWorker {
		return false
	}
	if b.on == nil {
		b.on = make(map[*Worker]int)
	}
	b.running++
	b.on[w]++
	return true
}

// End records that a request has ended.
func (b *background) End(w *Worker) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running--
	if b.on[w]--; b.on[w] == 0 {
		delete(b.on, w)
	}
}
