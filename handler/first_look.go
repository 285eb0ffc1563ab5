package handler

import (
	"context"
	"sync"
)

// firstLook is the first look at a worker in one configuration.
type firstLook struct {
	mu   sync.Mutex
	of   *sharedSettings // identifies the configuration
	over chan struct{}   // closed after it
}

// lookFirst asks a worker for the first time in this configuration, or waits for
// the handler that does. It does not wait if the worker was asked before.
func (h *Handler) lookFirst(ctx context.Context, w *worker, under *sync.WaitGroup) {
	w.first.mu.Lock()
	defer w.first.mu.Unlock()
	over := w.first.over
	if w.first.of == h.config && over != nil {
		if !w.looked.Load() {
			under.Go(func() { <-over })
		}
		return
	}
	over = make(chan struct{})
	w.first.of, w.first.over = h.config, over
	w.probed.Store(now().UnixNano())
	began := w.probing.CompareAndSwap(false, true)
	under.Go(func() {
		defer close(over)
		h.probe(ctx, w, true)
		if began {
			w.probing.Store(false)
		}
	})
}
