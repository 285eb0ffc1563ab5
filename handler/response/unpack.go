package response

import (
	"bufio"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"strings"
)

// Unpack takes the gzip off an answer. The router asks engines not to compress
// what it reads. Some do so regardless, or a proxy before them does: then a
// client that does not know gzip could not read the answer, nor could the router.
func Unpack(resp *http.Response) {
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
	plain         io.Reader
	err           error
}

// Read implements io.Reader.
func (u *unpacked) Read(p []byte) (int, error) {
	if u.plain == nil && u.err == nil { // reading gzip's header waits for the answer
		in := bufio.NewReader(u.ReadCloser)
		magic, err := in.Peek(2)
		switch {
		case len(magic) == 2 && magic[0] == 0x1f && magic[1] == 0x8b:
			u.plain, u.err = gzip.NewReader(in)
		case len(magic) > 0 || errors.Is(err, io.EOF):
			u.plain = in // the label is wrong
		default:
			u.err = err
		}
	}
	if u.err != nil {
		return 0, u.err
	}
	return u.plain.Read(p)
}
