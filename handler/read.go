package handler

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// firstRead is what is allocated on the word of a Content-Length alone. What
// a client merely announces must not cost memory.
const firstRead = 512 << 10

// readBody reads a body of at most limit bytes into memory, which is counted in
// held. A longer one is given back as a stream, and so is one that there is no
// room for, as what is held may not be more than maxBodies. length is the
// Content-Length, negative if it is not known.
func readBody(body io.ReadCloser, length, limit int64, held *atomic.Int64) (all *buffer, rest *once, err error) {
	size := length
	if size < 0 {
		size = 16 << 10
	}
	// one byte more than announced, so that EOF is seen without growing
	b := newBuffer(min(size+1, firstRead))
	b.count(held)
	for {
		n, err := body.Read(b.data[len(b.data):cap(b.data)])
		b.data = b.data[:len(b.data)+n]
		if errors.Is(err, io.EOF) {
			return b, nil, nil
		}
		if err != nil {
			b.free()
			return nil, nil, err
		}
		if int64(len(b.data)) > limit {
			return nil, restOf(b, body, false), nil
		}
		if len(b.data) == cap(b.data) {
			grown := int64(cap(b.data)) * 4
			if len(b.data) > firstRead {
				grown /= 2 // what is held and not filled may be missed elsewhere
			}
			if length > 0 {
				grown = min(grown, length+1)
			}
			grown = max(min(grown, limit+1), int64(cap(b.data))+1)
			if grown > firstRead && held.Load()+grown > maxBodies {
				return nil, restOf(b, body, true), nil
			}
			larger := newBuffer(grown)
			larger.count(held)
			larger.data = append(larger.data, b.data...)
			b.free()
			b = larger
		}
	}
}

// restOf returns a body of which the beginning was read into b.
func restOf(b *buffer, body io.ReadCloser, noRoom bool) *once {
	o := &once{ReadCloser: body, left: b.data, began: true, noRoom: noRoom}
	o.begun.Store(b)
	return o
}

// unreadable turns a failure to read the client's body into an answer.
func unreadable(a api.API, err error) *ownError {
	if limit, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		return &ownError{a, http.StatusRequestEntityTooLarge, codeTooLarge, "", fmt.Errorf(
			"the body is longer than the server takes, which is %d bytes", limit.Limit)}
	}
	return &ownError{a, http.StatusBadRequest, codeUnreadable, "", fmt.Errorf("reading request body: %w", err)}
}

// compressed tells whether the body behind a header is not to be read as it is.
func compressed(h http.Header) bool {
	coding := strings.TrimSpace(h.Get("Content-Encoding"))
	return coding != "" && !strings.EqualFold(coding, "identity")
}

// lazyBody is the body that the proxy has of a request: the transport gives
// each attempt its own, so that this one is opened only if somebody else reads
// it.
type lazyBody struct {
	of   *replay
	open io.ReadCloser
}

// Read implements io.Reader.
func (l *lazyBody) Read(p []byte) (int, error) {
	if l.open == nil {
		if l.of == nil {
			return 0, http.ErrBodyReadAfterClose
		}
		l.open = l.of.open()
	}
	return l.open.Read(p)
}

// Close implements io.Closer.
func (l *lazyBody) Close() error { return nil }

// once is a body that can be sent only once.
type once struct {
	io.ReadCloser
	begun   atomic.Pointer[buffer] // was read beforehand; nil if nothing was, or it is not needed any more
	left    []byte                 // of that, is not sent yet
	began   bool                   // something was
	noRoom  bool                   // there was no room for more
	touched atomic.Bool            // some of it was asked for
	failed  atomic.Bool            // it could not be read
	ended   func()                 // is told that all of it was, if not nil
}

// done takes in that what was read beforehand was sent, or will not be. Who still
// reads it has it to himself.
func (o *once) done() {
	if o == nil {
		return
	}
	if b := o.begun.Swap(nil); b != nil {
		b.uncount()
	}
}

// Read implements io.Reader.
func (o *once) Read(p []byte) (int, error) {
	o.touched.Store(true)
	if len(o.left) > 0 {
		n := copy(p, o.left)
		if o.left = o.left[n:]; len(o.left) == 0 {
			o.left = nil
			o.done()
		}
		return n, nil
	}
	n, err := o.ReadCloser.Read(p)
	switch {
	case err == nil:
	case !errors.Is(err, io.EOF):
		o.failed.Store(true)
	case o.ended != nil:
		o.ended()
	}
	return n, err
}
