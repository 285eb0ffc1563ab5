package pool

import "sync/atomic"

const (
	// maxBackground bounds the router's own requests beside clients' requests on one worker.
	maxBackground = 2
	// maxBackgroundBytes bounds the memory that future ones reserve in a pool.
	maxBackgroundBytes = 256 << 20
)

// background bounds the router's own requests that run beside clients' requests.
type background struct {
	reserved atomic.Int64 // bytes
	Running  atomic.Int64
}

// Reserve reserves n bytes for a future request, until the caller calls Release. It returns
// false if there is no room for them.
func (b *background) Reserve(n int64) bool {
	if b.reserved.Add(n) > maxBackgroundBytes {
		b.reserved.Add(-n)
		return false
	}
	return true
}

// Release ends a reservation.
func (b *background) Release(n int64) { b.reserved.Add(-n) }

// Begin registers a request on a worker, until the caller calls End. It returns false if
// there are too many.
func (b *background) Begin(w *Worker) bool {
	if w.background.Add(1) > maxBackground {
		w.background.Add(-1)
		return false
	}
	b.Running.Add(1)
	return true
}

// End records that a request has ended.
func (b *background) End(w *Worker) {
	w.background.Add(-1)
	b.Running.Add(-1)
}
