package response

import (
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
)

// Keepalive is the client's side of a stream. While the stream is silent, the client gets comments
// between two events, so that no proxy on the way cuts the stream off. If the answer's header takes
// so long, the client first gets the router's own. An answer that then is no stream becomes an error
// event in the API's shape.
//
// The handlers behind it write as to any http.ResponseWriter, from one goroutine.
type Keepalive struct {
	client http.ResponseWriter
	api    api.API
	every  time.Duration // between two ticks
	header http.Header   // of the answer; nil before that
	passed bool          // the answer's header has gone out, or is dropped
	clean  bool          // all that was written is flushed

	mu     sync.Mutex // held while the client is written to
	timer  *time.Timer
	early  http.Header // the router's own; nil if the client waits for the answer's
	may    func() bool // whether the client may get it now
	own    bool        // the client has it
	sent   bool        // the client has a header
	quiet  bool        // the client gets no more comments
	wrote  bool        // since the last tick
	silent int         // ticks that the stream has been silent, rounded up
	last   [4]byte     // bytes that the client got: an event may end in several writes
	status int         // of an answer that becomes an error event; 0 if there is none
	failed []byte      // its body
}

// ticks is how often the silence is looked at before a comment. So a write need not look at the clock.
const ticks = 4

// maxErrorBody is how much of an answer is kept for an error event, in bytes.
const maxErrorBody = 64 << 10

// Keep has a client's stream kept alive until Close: it is not silent for longer than every. early is
// the header that the client gets if the answer's takes too long and may returns true. It is nil if the
// client waits for the answer's.
func Keep(client http.ResponseWriter, a api.API, every time.Duration, early http.Header, may func() bool) *Keepalive {
	k := &Keepalive{
		client: client, api: a, every: max(every/ticks, time.Millisecond), early: early, may: may, last: [4]byte{2: '\n', 3: '\n'},
	}
	k.mu.Lock() // tick needs the timer
	defer k.mu.Unlock()
	k.timer = time.AfterFunc(k.every, k.tick)
	return k
}

// tick sends a comment if the stream has been silent long enough.
func (k *Keepalive) tick() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.quiet {
		return
	}
	k.timer.Reset(k.every)
	if k.silent++; k.wrote {
		k.wrote, k.silent = false, 1 // the write may be as old as a tick
	}
	end := ending(k.last[:])
	if k.silent < ticks || end == "" || !k.sent && (k.early == nil || !k.may()) {
		return
	}
	if !k.sent {
		k.sent, k.own = true, true
		for name, values := range k.early {
			k.client.Header()[name] = slices.Clone(values)
		}
		k.client.WriteHeader(http.StatusOK)
	}
	k.silent = 0
	_, _ = k.client.Write([]byte(": keepalive" + end))
	_ = k.flush()
}

// Late returns whether the client has the router's header. If it has not, it will not get it.
func (k *Keepalive) Late() bool {
	if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.early = nil
	return k.own
}

// Header implements http.ResponseWriter. It is first called when there is an answer.
func (k *Keepalive) Header() http.Header {
	if k.header == nil {
		if k.Late() { // first: until then, tick may write the client's header
			k.header = make(http.Header)
		} else {
			k.header = k.client.Header()
		}
	}
	return k.header
}

func (k *Keepalive) WriteHeader(status int) {
	if k.passed || status < http.StatusOK { // engines send no early hints with a stream
		return
	}
	k.passed = true
	h := k.Header()
	streams := status == http.StatusOK && body.MediaType(h) == body.EventStream && !body.Compressed(h)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.own {
		switch {
		case status == http.StatusOK && !streams:
			k.status = http.StatusBadGateway // the client cannot read it any more
		case !streams:
			k.status = status
		}
		return
	}
	k.sent, k.wrote = true, true
	k.quiet = !streams || h.Get("Content-Length") != ""
	k.client.WriteHeader(status)
}

func (k *Keepalive) Write(p []byte) (int, error) {
	k.WriteHeader(http.StatusOK) // unless it was written
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.status != 0 {
		k.failed = append(k.failed, p[:min(len(p), maxErrorBody-len(k.failed))]...)
		return len(p), nil
	}
	k.wrote = true
	k.saw(p)
	n, err := k.client.Write(p)
	if !k.quiet && err == nil { // here, for one lock is cheaper than two
		k.clean, err = true, k.flush()
	}
	return n, err
}

// saw notes what the client gets.
func (k *Keepalive) saw(p []byte) {
	for _, b := range p[max(0, len(p)-len(k.last)):] {
		k.last = [4]byte{k.last[1], k.last[2], k.last[3], b}
	}
}

// ending returns how an event's last bytes end it; an empty string if they do not.
func ending(p []byte) string {
	for _, end := range [...]string{"\n\n", "\r\n\r\n", "\r\r"} {
		if n := len(p) - len(end); n >= 0 && string(p[n:]) == end {
			return end
		}
	}
	return ""
}

// FlushError is what http.ResponseController calls.
func (k *Keepalive) FlushError() error {
	if k.clean {
		k.clean = false
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.flush()
}

func (k *Keepalive) flush() error { return http.NewResponseController(k.client).Flush() }

// Unwrap is for http.ResponseController.
func (k *Keepalive) Unwrap() http.ResponseWriter { return k.client }

// Close ends the comments. An answer that was no stream reaches the client as an error event.
func (k *Keepalive) Close() {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.timer.Stop()
	k.quiet = true
	if k.status != 0 {
		_, _ = k.client.Write([]byte(api.ErrorEvent(k.api, k.status, k.failed)))
		k.status = 0
	}
}
