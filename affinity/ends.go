package affinity

import (
	"context"
	"sync"
)

// maxEnds bounds the ends that wait for OnExpire.
const maxEnds = 1 << 16

type event struct {
	key     Key
	binding Binding
	why     Reason
	passed  chan struct{} // closed when it is this one's turn; nil for the end of a binding
}

// queue delivers ends to the owner, one at a time and in order, on its own goroutine. It never
// blocks those that add to it.
type queue struct {
	deliver func(key Key, b Binding, why Reason) // nil: nobody wants them
	done    chan struct{}                        // closed when the delivering goroutine has ended

	mu     sync.Mutex
	more   sync.Cond // events were added, or the queue closed
	events []event
	closed bool
}

func newQueue(deliver func(Key, Binding, Reason)) *queue {
	q := &queue{deliver: deliver, done: make(chan struct{})}
	q.more.L = &q.mu
	go q.run()
	return q
}

// push adds an end. It drops the end if too many wait.
func (q *queue) push(ev event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed && q.deliver != nil && len(q.events) < maxEnds {
		q.events = append(q.events, ev)
		q.more.Signal()
	}
}

// flush waits until the ends that were added before have been delivered.
func (q *queue) flush(ctx context.Context) {
	ev := event{passed: make(chan struct{})}
	q.mu.Lock()
	q.events = append(q.events, ev)
	q.more.Signal()
	q.mu.Unlock()
	select {
	case <-ev.passed:
	case <-ctx.Done():
	case <-q.done:
	}
}

func (q *queue) run() {
	defer close(q.done)
	for {
		q.mu.Lock()
		for len(q.events) == 0 && !q.closed {
			q.more.Wait()
		}
		if q.closed {
			q.mu.Unlock()
			return
		}
		ev := q.events[0]
		if q.events = q.events[1:]; len(q.events) == 0 {
			q.events = nil // frees the array of a burst
		}
		q.mu.Unlock()
		if ev.passed != nil {
			close(ev.passed)
		} else {
			q.deliver(ev.key, ev.binding, ev.why)
		}
	}
}

// close waits for the current delivery and drops the others.
func (q *queue) close() {
	q.mu.Lock()
	q.closed, q.events = true, nil
	q.more.Signal()
	q.mu.Unlock()
	<-q.done
}
