package response

import (
	"maps"
	"net/http"
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
	every  time.Duration
	start  time.Time
	header http.Header // of the answer, which becomes the client's unless the client has the router's
	passed bool        // the answer's header has come

	mu     sync.Mutex // held while the client is written to
	timer  *time.Timer
	early  http.Header   // the router's own; nil if the client waits for the answer's
	own    bool          // the client has it
	quiet  bool          // the client gets no more comments
	last   time.Duration // from start to when the client last got something
	end    string        // of the client's last event; empty within one
	status int           // of an answer that becomes an error event; 0 if there is none
	failed []byte        // its body
}

// maxErrorBody is how much of an answer is kept for an error event, in bytes.
const maxErrorBody = 64 << 10

// Keep has a client's stream kept alive until Close. early is the header that the client gets if the
// answer's takes too long; nil if it waits for that.
func Keep(client http.ResponseWriter, a api.API, every time.Duration, early http.Header) *Keepalive {
	k := &Keepalive{
		client: client, api: a, every: every, early: early, start: time.Now(), header: client.Header().Clone(), end: "\n\n",
	}
	k.mu.Lock() // tick needs the timer
	defer k.mu.Unlock()
	k.timer = time.AfterFunc(every, k.tick)
	return k
}

// tick sends a comment if the stream has been silent long enough.
func (k *Keepalive) tick() {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Since(k.start)
	switch wait := k.last + k.every - now; {
	case k.quiet:
		return
	case wait > 0:
		k.timer.Reset(wait)
		return
	case k.end == "" || k.last == 0 && k.early == nil: // within an event, or before the answer's header
		k.timer.Reset(k.every)
		return
	case k.last == 0:
		k.own = true
		maps.Copy(k.client.Header(), k.early)
		k.client.WriteHeader(http.StatusOK)
	}
	k.last = now
	if _, err := k.client.Write([]byte(": keepalive" + k.end)); err == nil {
		_ = http.NewResponseController(k.client).Flush()
		k.timer.Reset(k.every)
	}
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

func (k *Keepalive) Header() http.Header {
	if k.passed && !k.own {
		return k.client.Header()
	}
	return k.header
}

func (k *Keepalive) WriteHeader(status int) {
	if k.passed || status < http.StatusOK { // engines send no early hints with a stream
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.passed = true
	streams := status == http.StatusOK && body.MediaType(k.header) == body.EventStream && !body.Compressed(k.header)
	if k.own {
		if !streams {
			k.status = status
		}
		return
	}
	k.last = max(1, time.Since(k.start))
	k.quiet = !streams || k.header.Get("Content-Length") != ""
	to := k.client.Header()
	clear(to)
	maps.Copy(to, k.header)
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
	k.end = ending(p)
	n, err := k.client.Write(p)
	k.last = time.Since(k.start)
	return n, err
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
	k.mu.Lock()
	defer k.mu.Unlock()
	return http.NewResponseController(k.client).Flush()
}

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
