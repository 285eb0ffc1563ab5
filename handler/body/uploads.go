package body

import (
	"io"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// An upload is slow if it received less than leastReceived bytes, and less than
// one slowShare-th of what it has received in all, between two looks. Memory
// then costs its holder traffic: who holds 2 GiB must send 3 MB/s.
const (
	leastReceived = 10 << 10
	slowShare     = 64
)

// uploads are a pool's request bodies that are being read into memory and did
// not arrive with their first read.
type uploads struct {
	mu  sync.Mutex
	all map[*upload]struct{}
}

// upload is one request body while it is read into memory.
type upload struct {
	io.ReadCloser
	of       *uploads
	request  *http.Request
	received atomic.Int64 // bytes
	begun    bool         // it was read from

	// of.mu guards these
	listed bool
	looked bool
	seen   int64 // received as of the last look
	ended  bool  // it was slow
}

// read reads the request's body by readBody. A slow upload that was ended returns
// os.ErrDeadlineExceeded.
func (u *uploads) read(r *http.Request, limit int64, held *atomic.Int64) (all *Buffer, rest *Stream, err error) {
	if r.ContentLength >= 0 && r.ContentLength < firstRead {
		return readBody(r.Body, r.ContentLength, limit, held) // whose memory is less than its connection's
	}
	up := &upload{ReadCloser: r.Body, of: u, request: r}
	all, rest, err = readBody(up, r.ContentLength, limit, held)
	if up.leave() {
		// It may have been whole just before its connection got a deadline.
		if all != nil {
			all.free()
		}
		rest.Done()
		return nil, nil, os.ErrDeadlineExceeded
	}
	if rest != nil {
		rest.ReadCloser = r.Body
	}
	return all, rest, err
}

// Read implements io.Reader.
func (up *upload) Read(p []byte) (int, error) {
	if up.begun && !up.listed {
		up.of.add(up)
	}
	up.begun = true
	n, err := up.ReadCloser.Read(p)
	up.received.Add(int64(n))
	return n, err
}

// add lists an upload.
func (u *uploads) add(up *upload) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.all == nil {
		u.all = make(map[*upload]struct{})
	}
	u.all[up] = struct{}{}
	up.listed = true
}

// leave takes the upload off the list and reports whether it was ended for being
// slow. Its request must not return before.
func (up *upload) leave() (ended bool) {
	if !up.listed {
		return false
	}
	up.of.mu.Lock()
	defer up.of.mu.Unlock()
	delete(up.of.all, up)
	return up.ended
}

// endSlow looks at all uploads. If memory is short, it ends those that were slow
// since the last look, and returns how many. While there is memory, slow uploads
// go on.
func (u *uploads) endSlow(short bool) (ended int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for up := range u.all {
		received := up.received.Load()
		slow := up.looked && received-up.seen < max(leastReceived, received/slowShare)
		up.looked, up.seen = true, received
		if short && slow && !up.ended && up.end() {
			ended++
		}
	}
	return ended
}

// end ends the read that the upload waits in, and all further ones. It reports
// whether it could: it needs Caddy's read_idle_timeout, which is on by default.
// The list's lock is held, so that the request does not return meanwhile: its
// connection may then be another request's.
func (up *upload) end() bool {
	body, _ := caddyhttp.IdleTimeoutsFromContext(up.request.Context())
	up.ended = body != nil && body.SetReadDeadline(time.Unix(1, 0)) == nil
	return up.ended
}
