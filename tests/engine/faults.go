package engine

import (
	"fmt"
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
	// Hang reads the request and then does nothing until the client leaves.
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
}

func (f *Fault) complete() error {
	switch f.Kind {
	case NoFault, Refuse, Hang, CloseConn, Reset, FailTransfer:
	case NoSessions:
		orDefault(&f.Path, OpenPath)
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
	if f.Path != "" && (f.Kind == Refuse || f.Kind == NoSessions && f.Path != OpenPath) || f.Late && f.Path != OpenPath && f.Path != ClosePath {
		return fmt.Errorf("fault %q for the path %q", f.Kind, f.Path)
	}
	if f.Count < 0 {
		return fmt.Errorf("fault with a negative number: %+v", *f)
	}
	return nil
}

// faults is the fault that is set, and those of single paths. A Count that is not 0 is
// for how many more requests the fault is.
type faults struct {
	mu    sync.Mutex
	fault Fault
	paths map[string]Fault
}

func (s *faults) set(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case f.Path == "":
		s.fault = f
	case f.Kind == NoFault:
		delete(s.paths, f.Path)
	default:
		if s.paths == nil {
			s.paths = make(map[string]Fault)
		}
		s.paths[f.Path] = f
	}
}

// clear ends all faults.
func (s *faults) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault, s.paths = Fault{}, nil
}

// take returns the fault that the next request meets: its path's, or else the one for
// all.
func (s *faults) take(path string, inference bool) Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f, ok := s.paths[path]; ok {
		if f.Count == 1 {
			delete(s.paths, path)
		} else if f.Count > 1 {
			left := f
			left.Count--
			s.paths[path] = left
		}
		return f
	}
	f := s.fault
	if f.Kind == NoFault || f.Kind == Refuse || !inference {
		return Fault{}
	}
	if f.Count == 1 {
		s.fault = Fault{}
	} else if f.Count > 1 {
		s.fault.Count--
	}
	return f
}

// SetFault makes later requests fail with f, in place of any fault for the same Path
// before it; a Fault without a kind ends that. An error says that f makes no sense, or that the address
// could not be listened on again after Refuse; then nothing has changed.
func (e *Engine) SetFault(f Fault) error {
	if err := f.complete(); err != nil {
		return err
	}
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
		x.hang()
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

// hang waits until the client leaves or the engine dies.
func (x *exchange) hang() {
	select {
	case <-x.r.Context().Done():
	case <-x.life.dead:
		canned.CloseConn(x.w, false)
	}
	x.finish(Broken)
}
