package handler

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// firstRead is what is allocated on the word of a Content-Length alone. What
// a client merely announces must not cost memory.
const firstRead = 512 << 10

// readBody reads a body of at most limit bytes into memory. A longer one is
// given back as whole: the part that was read and then the rest, to be
// streamed. length is the Content-Length, negative if it is not known.
func readBody(body io.Reader, length, limit int64) (all []byte, whole io.Reader, err error) {
	size := length
	if size < 0 {
		size = 16 << 10
	}
	// one byte more than announced, so that EOF is seen without growing
	buf := make([]byte, 0, min(size, firstRead)+1)
	for {
		n, err := body.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if errors.Is(err, io.EOF) {
			return buf, nil, nil
		}
		if err != nil {
			return nil, nil, err
		}
		if int64(len(buf)) > limit {
			return nil, io.MultiReader(bytes.NewReader(buf), body), nil
		}
		if len(buf) == cap(buf) {
			grown := int64(cap(buf)) * 4
			if length > 0 {
				grown = min(grown, length+1)
			}
			buf = append(make([]byte, 0, max(min(grown, limit+1), int64(cap(buf))+1)), buf...)
		}
	}
}

// unreadable turns a failure to read the client's body into an answer.
func unreadable(err error) error {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return caddyhttp.Error(http.StatusRequestEntityTooLarge, err)
	default:
		return caddyhttp.Error(http.StatusBadRequest, fmt.Errorf("reading request body: %w", err))
	}
}

// compressed tells whether a body is not to be read as it is.
func compressed(h http.Header) bool {
	coding := strings.TrimSpace(h.Get("Content-Encoding"))
	return coding != "" && !strings.EqualFold(coding, "identity")
}

// replay is a body in memory, or none, that can be sent again and again.
type replay struct {
	parts [][]byte
	size  int64
}

func replayOf(parts ...[]byte) *replay {
	b := &replay{parts: parts}
	for _, p := range parts {
		b.size += int64(len(p))
	}
	return b
}

// open returns the body from its first byte.
func (b *replay) open() io.ReadCloser {
	if b.size == 0 {
		return http.NoBody
	}
	if len(b.parts) == 1 {
		return io.NopCloser(bytes.NewReader(b.parts[0]))
	}
	readers := make([]io.Reader, len(b.parts))
	for i, p := range b.parts {
		readers[i] = bytes.NewReader(p)
	}
	return io.NopCloser(io.MultiReader(readers...))
}

// once is a body that can be sent only once; touched says whether any of it
// was asked for.
type once struct {
	io.ReadCloser
	touched bool
}

// Read implements io.Reader.
func (o *once) Read(p []byte) (int, error) {
	o.touched = true
	return o.ReadCloser.Read(p)
}
