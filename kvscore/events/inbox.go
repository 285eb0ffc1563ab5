package events

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
	"golang.org/x/sync/semaphore"
)

// The bounds of what a stream has received and not yet handled. Beyond them, the connection
// is not read, and the publisher's queue fills.
const (
	maxQueued      = 1024     // messages
	maxReplayed    = 16 << 10 // messages of a replay
	maxQueuedBytes = 32 << 20 // a larger message waits until the queue is empty
)

// inbox is a connection to the publisher and the messages that have arrived over it.
type inbox struct {
	c        *zmtp.Conn
	messages chan *zmtp.Message // closed behind the last one
	room     *semaphore.Weighted
	spare    sync.Pool       // of messages, for their memory
	gone     context.Context // ends with the connection; its cause says why
	end      context.CancelCauseFunc
}

// newInbox reads a connection into a queue of at most n messages.
func newInbox(c *zmtp.Conn, n int) *inbox {
	b := &inbox{
		c: c, messages: make(chan *zmtp.Message, n), room: semaphore.NewWeighted(maxQueuedBytes),
		spare: sync.Pool{New: func() any { return new(zmtp.Message) }},
	}
	b.gone, b.end = context.WithCancelCause(context.Background())
	go b.read()
	return b
}

// read receives messages until the connection ends.
func (b *inbox) read() {
	defer close(b.messages)
	for {
		m := b.spare.Get().(*zmtp.Message) //nolint:forcetypeassert // the pool has no others
		if err := b.c.Recv(m); err != nil {
			b.end(err)
			return
		}
		if b.room.Acquire(b.gone, weight(m)) != nil {
			return
		}
		select {
		case b.messages <- m:
		case <-b.gone.Done():
			return
		}
	}
}

func weight(m *zmtp.Message) int64 { return int64(min(m.Size(), maxQueuedBytes)) }

// recycle makes room for others when a message is handled, and keeps its memory for one of them.
func (b *inbox) recycle(m *zmtp.Message) {
	b.room.Release(weight(m))
	b.spare.Put(m)
}

// next waits for the oldest message, but not longer than patience. It returns an error when ctx
// has ended, and when the connection has ended and all its messages are taken. Give the message
// back with recycle.
func (b *inbox) next(ctx context.Context, patience time.Duration) (m *zmtp.Message, err error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var ok bool
	select {
	case m, ok = <-b.messages:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(patience):
		return nil, fmt.Errorf("%w: nothing came for %v", zmtp.ErrSilent, patience)
	}
	if !ok {
		return nil, context.Cause(b.gone)
	}
	return m, nil
}

// stop ends the connection, waits for its goroutine and returns what ended the connection.
func (b *inbox) stop() error {
	b.end(context.Canceled)
	_ = b.c.Close()
	for range b.messages { //nolint:revive // until it is closed
	}
	return context.Cause(b.gone)
}
