package affinity

import (
	"context"
	"sync"
)

const maxEnds = 1 << 14

type event struct {
	key     Key
	binding Binding
	why     Reason
	passed  chan struct{} // closed when it is this one's turn; nil for the end of a binding
}

// queue delivers ends to the owner, one at a time and in order, on its own goroutine.
type queue struct {
	deliver func(key Key, b Binding, why Reason) // nil: nobody wants them
	events  chan *event
	closing chan struct{}
	running sync.WaitGroup
}

func newQueue(deliver func(Key, Binding, Reason)) *queue {
	q := &queue{deliver: deliver, events: make(chan *event, maxEnds), closing: make(chan struct{})}
	q.running.Go(q.run)
	return q
}

// push adds an end. It never blocks, and drops the end if too many wait.
func (q *queue) push(ev *event) {
	if q.deliver == nil {
		return
	}
	select {
	case q.events <- ev:
	default:
	}
}

func (q *queue) flush(ctx context.Context) {
	ev := &event{passed: make(chan struct{})}
	select {
	case q.events <- ev:
	case <-ctx.Done():
		return
	case <-q.closing:
		return
	}
	select {
	case <-ev.passed:
	case <-ctx.Done():
	case <-q.closing:
	}
}

func (q *queue) run() {
	for {
		select {
		case <-q.closing:
			return
		case ev := <-q.events:
			if ev.passed != nil {
				close(ev.passed)
			} else {
				q.deliver(ev.key, ev.binding, ev.why)
			}
		}
	}
}

// close waits for the current delivery and drops the others.
func (q *queue) close() {
	close(q.closing)
	q.running.Wait()
}
