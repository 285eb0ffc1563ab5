package handler

import (
	"bufio"
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

// beginsAsJSON tells whether a body begins as a JSON object does for some engine,
// and returns it with its beginning. Sounds, images and forms do not, and may be
// long.
func beginsAsJSON(body io.ReadCloser) (whole io.ReadCloser, is bool, err error) {
	in := bufio.NewReaderSize(body, maxSpace)
	whole = struct {
		io.Reader
		io.Closer
	}{in, body}
	for n := 1; n <= maxSpace; n++ {
		begin, err := in.Peek(n)
		if len(begin) < n {
			if errors.Is(err, io.EOF) {
				return whole, false, nil
			}
			return nil, false, err
		}
		if c := begin[n-1]; !isSpace(c) {
			return whole, opensObject(c), nil
		}
	}
	return whole, true, nil // for all that is known
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

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }

// opensObject tells whether a JSON object may begin with a byte, in UTF-8, UTF-16
// or UTF-32, with a byte order mark or without one.
func opensObject(c byte) bool { return c == '{' || c == 0 || c == 0xEF || c == 0xFE || c == 0xFF }
