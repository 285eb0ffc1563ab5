package engine

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// FaultKind is a way to fail.
type FaultKind string

const (
	// NoFault is none.
	NoFault FaultKind = ""
	// Refuse closes the listener: connections are refused. Requests that run go on.
	Refuse FaultKind = "refuse"
	// Hang reads the request and then does nothing until the client leaves.
	Hang FaultKind = "hang"
	// HangAfterHeader does so after a header with status 200.
	HangAfterHeader FaultKind = "hang_after_header"
	// CloseConn reads the request and closes the connection.
	CloseConn FaultKind = "close"
	// Reset reads the request and resets the connection.
	Reset FaultKind = "reset"
	// Die closes the connection after the number Chunks of content, or in the
	// middle of an answer that is not streamed.
	Die FaultKind = "die"
	// Status answers with an error of that status.
	Status FaultKind = "status"
	// Slow makes each step that the request takes part in Factor times longer.
	Slow FaultKind = "slow"
)

// Fault says how an engine fails. The zero value is that it does not.
type Fault struct {
	Kind FaultKind `json:"kind"`
	// Count is for how many requests the fault is. Default: all, until another
	// fault is set. Refuse cannot count.
	Count int `json:"count,omitempty"`
	// Everything makes requests fail that are not inference, too, such as
	// GET /health. Default: only chat and completions do.
	Everything bool `json:"everything,omitempty"`
	// Status is that of Status. Default: 503.
	Status int `json:"status,omitempty"`
	// RetryAfter is the answer's Retry-After with Status, in seconds. Default:
	// none.
	RetryAfter int `json:"retry_after,omitempty"`
	// Chunks is how many chunks of content, one for each token, come before the
	// end in Die; at most all but the last.
	Chunks int `json:"chunks,omitempty"`
	// Factor is that of Slow. Default: 10.
	Factor float64 `json:"factor,omitempty"`
}

func (f *Fault) complete() error {
	switch f.Kind {
	case NoFault, Refuse, Hang, HangAfterHeader, CloseConn, Reset, Die:
	case Status:
		orDefault(&f.Status, http.StatusServiceUnavailable)
		if f.Status < 400 || f.Status > 599 {
			return fmt.Errorf("fault with status %d", f.Status)
		}
	case Slow:
		orDefault(&f.Factor, 10)
		if f.Factor < 1 {
			return fmt.Errorf("fault with factor %v", f.Factor)
		}
	default:
		return fmt.Errorf("unknown fault %q", f.Kind)
	}
	if f.Count < 0 || f.Chunks < 0 || f.RetryAfter < 0 {
		return fmt.Errorf("fault with a negative number: %+v", *f)
	}
	return nil
}

// faults is the fault that is set, and for how many more requests.
type faults struct {
	mu    sync.Mutex
	fault Fault
	left  int // if Count is not 0
}

func (s *faults) set(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault, s.left = f, f.Count
}

// get returns the fault that is set, with the requests that are left to it.
func (s *faults) get() Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.fault
	f.Count = s.left
	return f
}

// take returns the fault that the next request meets.
func (s *faults) take(inference bool) Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.fault
	if f.Kind == NoFault || f.Kind == Refuse || !inference && !f.Everything {
		return Fault{}
	}
	if f.Count > 0 {
		if s.left--; s.left == 0 {
			s.fault = Fault{}
		}
	}
	return f
}

// SetFault makes later requests fail with f, in place of any fault before it; the
// zero Fault ends that. An error says that f makes no sense, or that the address
// could not be listened on again after Refuse; then nothing has changed.
func (e *Engine) SetFault(f Fault) error {
	if err := f.complete(); err != nil {
		return err
	}
	e.ops.Lock()
	defer e.ops.Unlock()
	switch {
	case e.srv == nil: // killed; Restart listens again, and ends the fault
	case f.Kind == Refuse && e.listener != nil:
		e.listener.Close()
		e.listener = nil
		e.srv.SetKeepAlivesEnabled(false) // closes the idle connections
	case f.Kind != Refuse && e.listener == nil:
		ln, err := canned.ListenAgain(e.addr)
		if err != nil {
			return err
		}
		e.serve(ln)
	}
	e.faults.set(f)
	return nil
}

// fail does what f says in place of an answer, and says whether it did.
func (x *exchange) fail(f Fault) bool {
	switch f.Kind {
	case NoFault, Refuse, Die, Slow:
		return false
	case Hang:
		x.hang()
	case HangAfterHeader:
		x.header(http.StatusOK, "text/event-stream; charset=utf-8")
		http.NewResponseController(x.w).Flush() //nolint:errcheck // the client may leave
		x.hang()
	case CloseConn, Reset:
		hangUp(x.w, f.Kind == Reset)
		x.finish(Broken)
	case Status:
		if f.RetryAfter > 0 {
			x.w.Header().Set("Retry-After", strconv.Itoa(f.RetryAfter))
		}
		x.refuse(&apiError{f.Status, "ServiceUnavailableError", "The engine refuses requests.", ""})
		x.finish(Refused)
	}
	return true
}

// hang waits until the client leaves or the engine dies.
func (x *exchange) hang() {
	select {
	case <-x.r.Context().Done():
	case <-x.life.dead:
		hangUp(x.w, false)
	}
	x.finish(Broken)
}

// hangUp closes the connection of an answer, with or without a reset.
func hangUp(w http.ResponseWriter, reset bool) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return // closed already
	}
	if tc, ok := conn.(*net.TCPConn); ok && reset {
		tc.SetLinger(0) //nolint:errcheck // then it is a plain close
	}
	conn.Close()
}
