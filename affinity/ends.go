package affinity

import (
	"context"
	"sync"
)

type event struct {
	key     Key
	binding Binding
	why     Reason
	passed  chan struct{} // closed when it is this one's turn; nil for the end of a binding
}

// queue delivers ends to the owner, one at a time and in order, on its own goroutine.
//
// It is bounded, and never drops or blocks. The store claims a place when it accepts an
// engine-backed binding. It gives the place back when the binding is removed or its end has
// been delivered. Claimed places are therefore live engine-backed bindings and undelivered
// ends. Without a free place, the store refuses the binding.
//
// A nil queue delivers nothing.
type queue struct {
	deliver func(key Key, b Binding, why Reason)
	wake    chan struct{} // capacity 1: events were added, or the queue closed
	done    chan struct{} // closed when the delivering goroutine has ended

	mu      sync.Mutex
	events  []event
	ends    int // of bindings that are not delivered yet
	claimed int
	limit   int // of claimed
	closed  bool
}

func newQueue(deliver func(Key, Binding, Reason)) *queue {
	q := &queue{
		deliver: deliver,
		wake:    make(chan struct{}, 1),
		done:    make(chan struct{}),
	}
	go q.run()
	return q
}

// spareClaims lets a small store end many bindings at once.
const spareClaims = 1024

// setLimit makes room for as many undelivered ends as there can be bindings. It never
// reduces the room, because each live binding has claimed a place.
func (q *queue) setLimit(maxSessions int) {
	if q == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.limit = max(q.limit, 2*maxSessions+spareClaims)
}

// claim reserves the place of one end.
func (q *queue) claim() bool {
	if q == nil {
		return true
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.claimed >= q.limit {
		return false
	}
	q.claimed++
	return true
}

// settle gives a place back.
func (q *queue) settle() {
	if q == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.claimed--
}

// push adds an end that has a claimed place.
func (q *queue) push(ev event) {
	if q == nil {
		return
	}
	q.mu.Lock()
	q.events = append(q.events, ev)
	q.ends++
	q.mu.Unlock()
	q.signal()
}

// flush waits until the ends that were added before have been delivered.
func (q *queue) flush(ctx context.Context) {
	if q == nil {
		return
	}
	q.mu.Lock()
	if q.ends == 0 {
		q.mu.Unlock()
		return
	}
	passed := make(chan struct{})
	q.events = append(q.events, event{passed: passed})
	q.mu.Unlock()
	q.signal()
	select {
	case <-passed:
	case <-ctx.Done():
	case <-q.done:
	}
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *queue) run() {
	defer close(q.done)
	for range q.wake {
		for _, ev := range q.take() {
			if q.isClosed() {
				return
			}
			if ev.passed != nil {
				close(ev.passed)
				continue
			}
			q.deliver(ev.key, ev.binding, ev.why)
			q.delivered()
		}
		if q.isClosed() {
			return
		}
	}
}

func (q *queue) delivered() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ends--
	q.claimed--
}

func (q *queue) take() []event {
	q.mu.Lock()
	defer q.mu.Unlock()
	events := q.events
	q.events = nil
	return events
}

func (q *queue) isClosed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.closed
}

// close waits for the current delivery and drops the others.
func (q *queue) close() {
	if q == nil {
		return
	}
	q.mu.Lock()
	q.closed = true
	q.events = nil
	q.mu.Unlock()
	q.signal()
	<-q.done
}
