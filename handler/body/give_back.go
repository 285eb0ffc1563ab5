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
//	state     | the memory's owner              | what closes it
//	----------|---------------------------------|---------------------------------
//	unread    | none: it is in the connection   | the server
//	in memory | Plan.Body, then Dispatch.Body   | Plan.Close or Dispatch.End; each
//	          |                                 | reader closes its own share, and
//	          |                                 | Lazy.Release the proxy's
//	once      | Once, until it is sent          | Once.Done; the server the rest
//	gone      | none                            | nothing: reads return an error
//
// GiveBack makes a body for the error routes of "in memory", and of a "once" that no attempt
// has read from. Its memory is owned by returned, until it is read or the request ends.

// GiveBack puts what the router has read of a request's body in front of the rest. Caddy's
// error routes get that request and may send it elsewhere. The body is either body or once;
// both are nil if it is gone.
func GiveBack(r *http.Request, body *Replay, once *Once) {
	switch {
	case r.Context().Err() != nil: // no error route can serve the client
	case body != nil:
		if body.Size > 0 {
			returnTo(r, body.open())
		}
	case once == nil || once.began && once.Touched.Load():
		// An attempt has some of it. The rest alone would be another request.
		r.Body = struct {
			goneBody
			io.Closer
		}{Closer: r.Body}
	case once.began:
		if b := once.begun.Swap(nil); b != nil {
			begin := NewReplay(b, once.left)
			returnTo(r, begin.open())
			begin.Done()
		}
	}
}

// returnTo puts bytes in front of the rest of a request's body. It closes their reader once
// they are read or the request ends.
func returnTo(r *http.Request, read io.ReadCloser) {
	begin := &returned{ReadCloser: read}
	context.AfterFunc(r.Context(), func() { _ = begin.Close() })
	before := func(rest io.ReadCloser) io.ReadCloser {
		return &returnedBody{io.MultiReader(begin, rest), begin, rest}
	}
	r.Body = before(r.Body)
	// Handlers such as forward_auth pass on a copy of the request, and the error routes
	// get the original. If the server has a read timeout, both read through its reader.
	// The old reader keeps returning EOF, so it is replaced.
	if server, _ := caddyhttp.IdleTimeoutsFromContext(r.Context()); server != nil {
		*server = caddyhttp.IdleTimeoutReader{
			ReadCloser: before(server.ReadCloser),
			Ctrl:       server.Ctrl, Deadline: server.Deadline, Logger: server.Logger,
			DrainDeadline: server.DrainDeadline, ClearBetweenReads: true,
		}
	}
}

// returned is the beginning of a body, in memory.
type returned struct {
	io.ReadCloser
	atEnd atomic.Bool
}

// Read implements io.Reader. At the end it releases the memory.
func (b *returned) Read(p []byte) (int, error) {
	if b.atEnd.Load() {
		return 0, io.EOF
	}
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		b.atEnd.Store(true)
		_ = b.Close()
	}
	return n, err
}

// returnedBody is a whole body again. A request and its copies share the beginning.
type returnedBody struct {
	io.Reader
	begin, rest io.Closer
}

func (b *returnedBody) Close() error {
	_ = b.begin.Close()
	return b.rest.Close()
}

// goneBody is a body that cannot be read again.
type goneBody struct{}

func (goneBody) Read([]byte) (int, error) { return 0, http.ErrBodyReadAfterClose }
