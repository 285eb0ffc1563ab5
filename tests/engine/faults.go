package engine

import (
	"net/http"
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
	// Hang reads the request and then does nothing until the client leaves, or until Until is closed.
	Hang FaultKind = "hang"
	// CloseConn reads the request and closes the connection.
	CloseConn FaultKind = "close"
	// Reset reads the request and resets the connection.
	Reset FaultKind = "reset"
	// Status answers with an error of that status.
	Status FaultKind = "status"
	// NoSessions refuses to open sessions, as an SGLang without them does.
	NoSessions FaultKind = "no_sessions"
	// FailTransfer has a decode phase get no KV from the prefill engine.
	FailTransfer FaultKind = "transfer"
	// Slow makes each step that the request takes part in Factor times longer.
	Slow FaultKind = "slow"
)

// Fault says how an engine fails. The zero value is that it does not.
type Fault struct {
	Kind FaultKind
	// Count is for how many requests the fault is. Default: all, until another
	// fault is set. Refuse cannot count.
	Count int
	// Path is the path whose requests the fault is for, whatever they are. Each path
	// has its own fault, beside the one for all. Default: none; OpenPath for NoSessions.
	Path string
	// Late has OpenPath or ClosePath fail when the engine has done it, instead of
	// before.
	Late bool
	// Status is that of Status. Default: 503.
	Status int
	// Factor is that of Slow. Default: 10.
	Factor float64
	// Until is what Hang waits for. The engine then serves the request. Default: nothing.
	Until <-chan struct{}
}

func (f *Fault) complete() {
	switch f.Kind {
	case NoSessions:
		f.Path = OpenPath
	case Status:
		orDefault(&f.Status, http.StatusServiceUnavailable)
	case Slow:
		orDefault(&f.Factor, 10)
	case NoFault, Refuse, Hang, CloseConn, Reset, FailTransfer:
	}
}

// faults are those that are set, by path; empty: the one for all. A Count that is not 0 is for how many
// more requests the fault is.
type faults struct {
	mu     sync.Mutex
	byPath map[string]Fault
}

func (s *faults) set(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.Kind == NoFault {
		delete(s.byPath, f.Path)
	} else {
		s.byPath[f.Path] = f
	}
}

// clear ends all faults.
func (s *faults) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.byPath = make(map[string]Fault)
}

// take returns the fault that the next request meets: its path's, or else the one for
// all.
func (s *faults) take(path string, inference bool) Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.byPath[path]
	if !ok && inference {
		f = s.byPath[""]
	}
	left := f
	switch left.Count--; left.Count {
	case -1:
	case 0:
		delete(s.byPath, f.Path)
	default:
		s.byPath[f.Path] = left
	}
	return f
}

// SetFault makes later requests fail with f, in place of any fault for the same Path
// before it; a Fault without a kind ends that. An error says that the address could not be listened on
// again after Refuse; then nothing has changed.
func (e *Engine) SetFault(f Fault) error {
	f.complete()
	e.ops.Lock()
	defer e.ops.Unlock()
	switch {
	case f.Path != "": // it does not change how the engine listens
	case f.Kind == Refuse:
		e.server.Refuse()
	default:
		if err := e.server.Accept(); err != nil {
			return err
		}
	}
	e.faults.set(f)
	return nil
}

// fail does what f says in place of an answer, and says whether it did.
func (x *exchange) fail(f Fault) bool {
	switch f.Kind {
	case NoFault, Refuse, Slow, FailTransfer:
		return false
	case Hang:
		return x.hang(f.Until)
	case NoSessions:
		x.refuseSession()
	case CloseConn, Reset:
		canned.CloseConn(x.w, f.Kind == Reset)
		x.finish(Broken)
	case Status:
		x.refuse(&apiError{f.Status, "ServiceUnavailableError", "The engine refuses requests.", ""})
		x.finish(Refused)
	}
	return true
}

// hang waits until the client leaves, the engine dies or until is closed. In the last case it returns false.
func (x *exchange) hang(until <-chan struct{}) bool {
	select {
	case <-until:
		return false
	case <-x.r.Context().Done():
	case <-x.life.dead:
		canned.CloseConn(x.w, false)
	}
	x.finish(Broken)
	return true
}
