package events

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
)

// The bounds of what a stream has received and not yet handled. Beyond them, the connection
// is not read, and the publisher's queue fills.
const (
	maxQueued      = 1024     // messages
	maxReplayed    = 16 << 10 // messages of a replay
	maxQueuedBytes = 32 << 20 // the message that reaches the bound is still accepted
	maxSpare       = 16       // messages kept for their memory
)

// inbox is a connection to the publisher and the messages that have arrived over it.
type inbox struct {
	c    *zmtp.Conn
	q    *queue
	gone context.Context // ends with the connection; its cause says why
	end  context.CancelCauseFunc
	done chan struct{} // the reading goroutine has ended
}

// newInbox reads a connection into a queue of at most n messages.
func newInbox(c *zmtp.Conn, n int) *inbox {
	b := &inbox{c: c, q: newQueue(n), done: make(chan struct{})}
	b.gone, b.end = context.WithCancelCause(context.Background())
	go b.read()
	return b
}

// read receives messages until the connection ends.
func (b *inbox) read() {
	defer close(b.done)
	for {
		m := b.q.spare()
		if err := b.c.Recv(m); err != nil {
			b.end(err)
			return
		}
		if !b.q.push(m) {
			return
		}
	}
}

// next waits for the oldest message, but not longer than patience. It returns an error when ctx
// has ended, and when the connection has ended and all its messages are taken.
func (b *inbox) next(ctx context.Context, patience time.Duration) (*zmtp.Message, error) {
	var late <-chan time.Time
	for ctx.Err() == nil {
		over := b.gone.Err() != nil // asked first: nothing is pushed after that
		if m, ok := b.q.pop(); ok {
			return m, nil
		}
		if over {
			return nil, context.Cause(b.gone)
		}
		if late == nil {
			late = time.After(patience)
		}
		select {
		case <-ctx.Done():
		case <-late:
			return nil, fmt.Errorf("%w: nothing came for %v", zmtp.ErrSilent, patience)
		case <-b.q.ready:
		case <-b.gone.Done():
		}
	}
	return nil, ctx.Err()
}

// stop ends the connection, waits for its goroutine and returns what ended the connection.
func (b *inbox) stop() error {
	b.end(context.Canceled)
	_ = b.c.Close()
	b.q.close()
	<-b.done
	return context.Cause(b.gone)
}

// queue is a bounded queue of messages. One goroutine pushes and one pops.
type queue struct {
	ready chan struct{} // holds a token after a push
	room  chan struct{} // holds a token after a pop

	mu     sync.Mutex
	items  []*zmtp.Message // a ring
	head   int
	length int
	bytes  int
	unused []*zmtp.Message
	closed bool
}

func newQueue(n int) *queue {
	return &queue{items: make([]*zmtp.Message, n), ready: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// push adds a message as soon as there is room. It returns false once the queue is closed.
func (q *queue) push(m *zmtp.Message) bool {
	for {
		q.mu.Lock()
		if q.closed {
			q.mu.Unlock()
			return false
		}
		if q.length < len(q.items) && q.bytes < maxQueuedBytes {
			q.items[(q.head+q.length)%len(q.items)] = m
			q.length++
			q.bytes += m.Size()
			q.mu.Unlock()
			signal(q.ready)
			return true
		}
		q.mu.Unlock()
		<-q.room
	}
}

// pop takes the oldest message, if there is one. Give it back with recycle.
func (q *queue) pop() (*zmtp.Message, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.length == 0 {
		return nil, false
	}
	m := q.items[q.head]
	q.items[q.head] = nil
	q.head = (q.head + 1) % len(q.items)
	q.length--
	q.bytes -= m.Size()
	signal(q.room)
	return m, true
}

// recycle keeps a handled message's memory for one to come.
func (q *queue) recycle(m *zmtp.Message) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.unused) < maxSpare {
		q.unused = append(q.unused, m)
	}
}

// spare returns a message to receive into.
func (q *queue) spare() *zmtp.Message {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(q.unused)
	if n == 0 {
		return new(zmtp.Message)
	}
	m := q.unused[n-1]
	q.unused = q.unused[:n-1]
	return m
}

// close ends push. What is queued is lost.
func (q *queue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	signal(q.room)
}
