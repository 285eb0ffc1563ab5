package handler

import (
	"io"
	"maps"
	"net/http"
	"strings"
)

// forward copies an answer's header but for what concerns one connection only
// (RFC 9110, 7.6.1).
func forward(to, from http.Header) {
	maps.Copy(to, from)
	for _, names := range from["Connection"] {
		for name := range strings.SplitSeq(names, ",") {
			to.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range []string{
		"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade",
	} {
		to.Del(name)
	}
}

// replayed is an answer's body of which a part was read already.
type replayed struct {
	io.ReadCloser
	held []byte
	err  error // that came with it
}

// Read implements io.Reader.
func (r *replayed) Read(p []byte) (int, error) {
	if len(r.held) > 0 {
		n := copy(p, r.held)
		r.held = r.held[n:]
		return n, nil
	}
	if r.err != nil {
		return 0, r.err
	}
	return r.ReadCloser.Read(p)
}
