package response

import (
	"io"
	"maps"
	"net/http"
	"strings"
)

// Forward copies an answer's header but for what concerns one connection only
// (RFC 9110, 7.6.1).
func Forward(to, from http.Header) {
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

// Replayed is an answer's body of which a part was read already.
type Replayed struct {
	io.ReadCloser
	Held []byte
	Err  error // that came with it
}

// Read implements io.Reader.
func (r *Replayed) Read(p []byte) (int, error) {
	if len(r.Held) > 0 {
		n := copy(p, r.Held)
		r.Held = r.Held[n:]
		return n, nil
	}
	if r.Err != nil {
		return 0, r.Err
	}
	return r.ReadCloser.Read(p)
}
