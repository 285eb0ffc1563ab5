package body

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// A request's body is in one of these states:
//
//	state     | the memory's holder            | who closes it
//	----------|--------------------------------|---------------------------------
//	unread    | nobody: it is in the connection| the server
//	in memory | Plan.Body, then Dispatch.Body  | Plan.Close or Dispatch.End; each
//	          |                                | reader closes its own share, and
//	          |                                | Lazy.Release the proxy's
//	streaming | Stream, until it was sent      | Stream.Done; the server the rest
//	gone      | nobody                         | nobody: reads return an error
//
// GiveBack changes "in memory", and "streaming" that no attempt has read from,
// into a body that the error routes read: returned holds that memory until it was
// read or the request ends.

// GiveBack puts what was read of a request's body back in front of the rest.
// Caddy's error routes get that request and may send it elsewhere. The body is
// body, or else stream; both are nil if the body is gone.
func GiveBack(r *http.Request, body *Replay, stream *Stream) {
	switch {
	case r.Context().Err() != nil: // no error route can serve the client
	case body != nil:
		if body.Size > 0 {
			returnTo(r, body.open())
		}
	case stream == nil || stream.began && stream.Touched.Load():
		// An attempt has some of it. The rest alone would be another request.
		r.Body = struct {
			goneBody
			io.Closer
		}{Closer: r.Body}
	case stream.began:
		if b := stream.begun.Swap(nil); b != nil {
			begin := NewReplay(b, stream.left)
			returnTo(r, begin.open())
			begin.Done()
		}
	}
}

// returnTo puts what was read before the rest of a request's body. Its memory is
// in use until it was read, or the request ends.
func returnTo(r *http.Request, read io.ReadCloser) {
	begin := &returned{ReadCloser: read}
	context.AfterFunc(r.Context(), func() { _ = begin.Close() })
	r.Body = &returnedBody{begin, r.Body}
	// Handlers such as forward_auth hand on a copy of the request, and the error
	// routes get the original. Both read through the server's reader, if it has a
	// timeout. The old reader keeps returning EOF, so it is replaced.
	if server, _ := caddyhttp.IdleTimeoutsFromContext(r.Context()); server != nil {
		*server = caddyhttp.IdleTimeoutReader{
			ReadCloser: &returnedBody{begin, server.ReadCloser},
			Ctrl:       server.Ctrl, Deadline: server.Deadline, Logger: server.Logger,
			DrainDeadline: server.DrainDeadline, ClearBetweenReads: true,
		}
	}
}

// returned is the beginning of a body, in memory.
type returned struct {
	io.ReadCloser
	over atomic.Bool
}

// Read implements io.Reader. At the end, the memory is let go of.
func (b *returned) Read(p []byte) (int, error) {
	if b.over.Load() {
		return 0, io.EOF
	}
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		b.over.Store(true)
		_ = b.Close()
	}
	return n, err
}

// returnedBody is a whole body again. The one of a request and the one of its
// copies share the beginning.
type returnedBody struct {
	begin *returned
	rest  io.ReadCloser
}

func (b *returnedBody) Read(p []byte) (int, error) {
	n, err := b.begin.Read(p)
	if errors.Is(err, io.EOF) {
		return b.rest.Read(p)
	}
	return n, err
}

func (b *returnedBody) Close() error {
	_ = b.begin.Close()
	return b.rest.Close()
}

// goneBody is a body that cannot be read again.
type goneBody struct{}

func (goneBody) Read([]byte) (int, error) { return 0, http.ErrBodyReadAfterClose }
