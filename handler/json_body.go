package handler

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
)

// saysJSON tells whether a header says that its body is JSON, or nothing.
func saysJSON(h http.Header) bool {
	kind := mediaType(h.Get("Content-Type"))
	return kind == "" || kind == "application/json" || strings.HasSuffix(kind, "+json")
}

// maxSpace is how many bytes of white space are passed over to see what comes
// behind.
const maxSpace = 512

// notJSON plans a request by load whose body says that it is no JSON and does not
// begin as a JSON object that can be read here. It is streamed through: sounds and
// forms may be long, and each message of a conversation waits for its answer. The
// plan is nil if the body has to be read.
func (h *Handler) notJSON(r *http.Request, fallback string) (*plan, error) {
	if saysJSON(r.Header) {
		return nil, nil
	}
	if strings.HasPrefix(mediaType(r.Header.Get("Content-Type")), "application/grpc") {
		p := h.passThrough(r, fallback) // the engine may speak first
		p.unread = fallbackMalformed
		return p, nil
	}
	begin, first, err := peek(r.Body)
	if err != nil {
		return nil, err
	}
	r.Body = &peeked{Reader: io.MultiReader(bytes.NewReader(begin), r.Body), Closer: r.Body, begin: begin, rest: r.Body}
	if first == '{' || first == ' ' {
		return nil, nil
	}
	p := h.passThrough(r, fallback)
	p.unread = ""
	switch {
	case first == nothing:
	case compressed(r.Header):
		p.unread = fallbackCompressed
	case opensObject(first):
		p.unread = fallbackMalformed // some engine may read it
	}
	return p, nil
}

// nothing is the first byte of a body that has only white space.
const nothing byte = '\n'

// peeked is a body of which the beginning was looked at.
type peeked struct {
	io.Reader
	io.Closer
	begin []byte
	rest  io.ReadCloser
}

// peek reads the beginning of a body, up to some bytes behind white space. It
// returns what it read, and the first byte that is not white space: a space after
// maxSpace bytes, nothing if there is none.
func peek(body io.Reader) (begin []byte, first byte, err error) {
	begin = make([]byte, 0, maxSpace)
	for n := 0; len(begin) < maxSpace; {
		m, err := body.Read(begin[len(begin):maxSpace])
		begin = begin[:len(begin)+m]
		for ; n < len(begin); n++ {
			if !isSpace(begin[n]) {
				return begin, begin[n], nil
			}
		}
		if errors.Is(err, io.EOF) {
			return begin, nothing, nil
		}
		if err != nil {
			return nil, nothing, err
		}
	}
	return begin, ' ', nil
}

// mayBeJSON tells whether some engine may read a body as a JSON object that cannot
// be read here.
func mayBeJSON(h http.Header, body []byte) bool {
	if compressed(h) {
		return len(body) > 0
	}
	for _, c := range body {
		if !isSpace(c) {
			return opensObject(c)
		}
	}
	return false
}

// mayCompute tells whether some engine may read a body as JSON and compute it that
// is streamed through. Of a body that is too long or has no room, the router knows
// that the engine computes nothing while the body arrives.
func (p *plan) mayCompute() bool {
	return p.unread == fallbackMalformed || p.unread == fallbackCompressed
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }

// opensObject tells whether a JSON object may begin with a byte, in UTF-8, UTF-16
// or UTF-32, with a byte order mark or without one.
func opensObject(c byte) bool { return c == '{' || c == 0 || c == 0xEF || c == 0xFE || c == 0xFF }
