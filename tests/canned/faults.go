package canned

import (
	"maps"
	"net"
	"net/http"
	"time"
)

// Kind is a kind of failure.
type Kind int

const (
	// None is no failure.
	None Kind = iota
	// CloseAfterRead closes the connection after the whole request was read,
	// without a byte of an answer.
	CloseAfterRead
	// ResetAfterRead does it with a TCP reset.
	ResetAfterRead
	// Status answers with the fault's status, header and body.
	Status
	// HangBeforeHeader reads the request and then does nothing until the client
	// leaves.
	HangBeforeHeader
	// DieMidStream closes the connection after the fault's number of words. An
	// answer that is not streamed is cut in the middle of its body.
	DieMidStream
)

// Fault says how an engine fails.
type Fault struct {
	Kind Kind
	// The answer of Status.
	Status int
	Header http.Header
	Body   string
	// The words that come before the end in DieMidStream.
	Words int
}

// SetFault makes all later requests fail with f; the zero Fault ends it.
func (e *Engine) SetFault(f Fault) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fault, e.faultFor = f, -1
}

// FailNext makes the next n requests fail with f, and none after them.
func (e *Engine) FailNext(n int, f Fault) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fault, e.faultFor = f, n
}

// HangUp has the engine close each connection that it has answered on when the next request comes, before it
// is read. A server does so whose keep-alive timeout runs out just then.
func (e *Engine) HangUp() { e.hangsUp.Store(true) }

// fail does what f says in place of an answer, and returns whether it did.
func (e *Engine) fail(w http.ResponseWriter, r *http.Request, f Fault) bool {
	switch f.Kind {
	case CloseAfterRead, ResetAfterRead:
		CloseConn(w, f.Kind == ResetAfterRead)
	case Status:
		h := w.Header()
		h.Set("Content-Type", "application/json")
		maps.Copy(h, f.Header)
		w.WriteHeader(f.Status)
		w.Write([]byte(f.Body)) //nolint:errcheck // the client may leave
	case HangBeforeHeader:
		select {
		case <-r.Context().Done():
		case <-time.After(time.Minute):
		}
	case None, DieMidStream:
		return false
	}
	return true
}

// CloseConn closes the connection of an answer, with or without a reset.
func CloseConn(w http.ResponseWriter, reset bool) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return // closed already
	}
	if tc, ok := conn.(*net.TCPConn); ok && reset {
		tc.SetLinger(0) //nolint:errcheck // then it is a plain close
	}
	conn.Close()
}
