package events

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
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
	maxQueuedBytes = 32 << 20
	// maxMessage bounds a message, in bytes. A batch of a million tokens has 5 MB.
	maxMessage = 16 << 20
	// largeTime bounds how long a message of more than 1 MiB may take, because it holds its bytes
	// from its beginning.
	largeTime = 30 * time.Second
)

// maxBytes returns the bound of the sum over all streams of the process. It is 256 MiB, or a sixteenth
// of the process's memory limit if that is less. Beside it, each connection may receive one message of
// up to 1 MiB.
func maxBytes() int64 { return max(2*maxMessage, min(256<<20, debug.SetMemoryLimit(-1)/16)) }

// allBytes returns what all streams of the process may still receive.
var allBytes = sync.OnceValue(func() *semaphore.Weighted { return semaphore.NewWeighted(maxBytes()) })

var (
	errLate = fmt.Errorf("a message of more than 1 MiB took longer than %v", largeTime)
	errMore = errors.New("a message goes on after a frame that made it larger than 1 MiB")
)

// inbox is a connection to the publisher and the messages that have arrived over it.
type inbox struct {
	c        *zmtp.Conn
	messages chan zmtp.Message // closed behind the last one
	bytes    *semaphore.Weighted
	gone     context.Context // ends with the connection; its cause says why
	end      context.CancelCauseFunc
	taken    int64       // bytes of the large message that is received
	late     *time.Timer // ends the connection if that does not come; nil without one
}

// newInbox reads a connection into a queue of at most n messages.
func newInbox(c *zmtp.Conn, n int) *inbox {
	b := &inbox{
		c: c, messages: make(chan zmtp.Message, n), bytes: semaphore.NewWeighted(maxQueuedBytes),
	}
	b.gone, b.end = context.WithCancelCause(context.Background())
	c.Room = b.begin
	go b.read()
	return b
}

func (b *inbox) read() {
	defer close(b.messages)
	for {
		m, err := b.c.Recv()
		if b.late != nil {
			b.late.Stop()
			b.late = nil
		}
		if err != nil {
			b.end(err)
			b.release(b.taken)
			return
		}
		if b.taken == 0 && b.take(int64(m.Size())) != nil {
			return
		}
		b.taken = 0
		select {
		case b.messages <- m:
		case <-b.gone.Done():
			b.handled(m)
			return
		}
	}
}

// begin makes room for a large message. The last frame of a batch makes it large. A stream that
// held room and waited for more could hold up all streams.
func (b *inbox) begin(n int) error {
	if b.taken > 0 {
		return errMore
	}
	if err := b.take(int64(n)); err != nil {
		return err
	}
	b.taken = int64(n)
	b.late = time.AfterFunc(largeTime, func() {
		b.end(errLate)
		_ = b.c.Close()
	})
	return nil
}

func (b *inbox) take(n int64) error {
	if err := b.bytes.Acquire(b.gone, n); err != nil {
		return context.Cause(b.gone)
	}
	if err := allBytes().Acquire(b.gone, n); err != nil {
		b.bytes.Release(n)
		return context.Cause(b.gone)
	}
	return nil
}

func (b *inbox) release(n int64) {
	b.bytes.Release(n)
	allBytes().Release(n)
}

// handled makes room for others when a message is handled.
func (b *inbox) handled(m zmtp.Message) { b.release(int64(m.Size())) }

// next waits for the oldest message, but not longer than patience. It returns an error when ctx
// has ended, and when the connection has ended and all its messages are taken. Call handled with it.
func (b *inbox) next(ctx context.Context, patience time.Duration) (m zmtp.Message, err error) {
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
	for m := range b.messages {
		b.handled(m)
	}
	return context.Cause(b.gone)
}
