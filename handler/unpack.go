package handler

import (
	"compress/gzip"
	"io"
	"net/http"
	"strings"
)

// unpack takes the gzip off an answer. The router asks engines not to compress
// what it reads. Some do so regardless, or a proxy before them does: then a
// client that does not know gzip could not read the answer, nor could the router.
func unpack(resp *http.Response) {
	if resp.Body == http.NoBody || !strings.EqualFold(strings.TrimSpace(resp.Header.Get("Content-Encoding")), "gzip") {
		return
	}
	resp.Body = &unpacked{ReadCloser: resp.Body}
	resp.Header.Del("Content-Encoding")
	resp.Header.Del("Content-Length")
	resp.ContentLength, resp.Uncompressed = -1, true
}

// unpacked is an answer's body without its gzip. What the engine has flushed can
// be read at once.
type unpacked struct {
	io.ReadCloser // as the engine sends it
	gzip          *gzip.Reader
	err           error
}

// Read implements io.Reader.
func (u *unpacked) Read(p []byte) (int, error) {
	if u.gzip == nil && u.err == nil { // reading gzip's header waits for the answer
		u.gzip, u.err = gzip.NewReader(u.ReadCloser)
	}
	if u.err != nil {
		return 0, u.err
	}
	return u.gzip.Read(p)
}
