package handler

import (
	"sync"
	"time"
)

// health is how a worker has done lately. A failure rates it down for
// half a second, further ones for up to three; then it is let back: one
// request first, and with each success twice as many at a time.
//
// The mark is passive and only ever a preference: if all workers are marked,
// the marks are ignored.
type health struct {
	mu     sync.Mutex
	until  time.Time // rated down before
	fails  int       // in a row
	window int64     // requests at a time while it is let back; 0 = no limit
}

const (
	firstDown  = 500 * time.Millisecond
	longest    = 3 * time.Second
	fullWindow = 32
)

// available tells whether the worker should get a request beside those that
// it has.
func (h *health) available(now time.Time, active int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.window == 0 {
		return true
	}
	return !now.Before(h.until) && active < h.window
}

// fail takes in that an attempt failed that was begun at the given time, and
// tells whether the worker was well before. wait is how long the worker asked
// to be left alone, 0 if it did not.
func (h *health) fail(now, begun time.Time, wait time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.window != 0 && begun.Before(h.until) {
		return false // one of those that were under way when it failed
	}
	was := h.window == 0
	down := min(firstDown<<min(h.fails, 8), longest)
	if wait > down {
		down = min(wait, longest)
	}
	h.fails++
	h.until, h.window = now.Add(down), 1
	return was
}

// succeed takes in that an attempt came to an answer, and tells whether the
// worker is now well again.
func (h *health) succeed(begun time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.window == 0 || begun.Before(h.until) {
		return false
	}
	h.fails = 0
	if h.window *= 2; h.window < fullWindow {
		return false
	}
	h.window = 0
	return true
}
