package response

import (
	"errors"
	"io"
	"time"
)

const (
	// maxAwaited is the most bytes that AwaitToken reads.
	maxAwaited = 64 << 10
	// maxUnread is the most events without a token that AwaitToken reads: the router
	// may not see the tokens of such a stream.
	maxUnread = 8
)

// chunk is what one read from the worker returned.
type chunk struct {
	data []byte
	err  error
}

// AwaitToken reads a stream up to its first token, an error in its place, or its end, for
// limit at most; 0 is no limit. Read returns these bytes later. An error says that the stream
// broke before its first token.
func (b *Body) AwaitToken(limit time.Duration) error {
	var over <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(limit)
		defer t.Stop()
		over = t.C
	}
	p := make([]byte, 2<<10) // most first events fit
	for {
		b.readAhead(p)
		var c chunk
		select {
		case c = <-b.ahead:
			b.ahead = nil
		case <-over:
			return nil // Read gets what comes next
		}
		out := b.pass(c.data, nil)
		begun := b.reader.FirstToken() || b.reader.Failed() || b.reader.Done() || b.reader.Others() > maxUnread
		if c.err != nil && !begun && !errors.Is(c.err, io.EOF) {
			_ = b.from.Close()
			return c.err
		}
		enough := begun || c.err != nil || len(b.rest)+len(out) >= maxAwaited
		if enough && len(b.rest) == 0 {
			b.rest = out // Read reads no more before the client has all of it
		} else {
			b.rest = append(b.rest, out...)
		}
		if enough {
			b.early = c.err
			return nil
		}
	}
}

// FailedFirst returns whether a stream brought an error in place of its first token.
func (b *Body) FailedFirst() bool {
	return b.Stream && b.reader != nil && b.reader.Failed() && !b.reader.FirstToken()
}

// readAhead begins a read from the worker. Its result comes through b.ahead; closing the body
// ends it.
func (b *Body) readAhead(p []byte) {
	ahead := make(chan chunk, 1)
	b.ahead = ahead
	go func() {
		n, err := b.from.Read(p)
		ahead <- chunk{p[:n], err}
	}()
}
