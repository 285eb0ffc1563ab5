package canned

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// gate is a listener that can stop to accept connections, and stay open.
type gate struct {
	net.Listener
	mu   sync.Mutex
	shut chan struct{} // nil while connections are accepted
}

// Accept implements net.Listener. What it has when the gate is shut, it keeps
// until the gate opens.
func (g *gate) Accept() (net.Conn, error) {
	conn, err := g.Listener.Accept()
	g.mu.Lock()
	shut := g.shut
	g.mu.Unlock()
	if shut != nil && err == nil {
		<-shut
	}
	return conn, err
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut == nil {
		g.shut = make(chan struct{})
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut != nil {
		close(g.shut)
		g.shut = nil
	}
}

// ListenAgain listens at an engine's address, which its own connections of
// before may still keep for a moment.
func ListenAgain(addr string) (net.Listener, error) {
	deadline := time.Now().Add(time.Minute)
	for {
		ln, err := net.Listen("tcp", addr)
		if err == nil {
			return ln, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("listening again: %w", err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// SetKeepAlive says whether connections are kept after an answer. Without, those
// that are idle are closed at once, the others with their answer.
func (e *Engine) SetKeepAlive(keep bool) {
	e.mu.Lock()
	srv := e.srv
	e.mu.Unlock()
	if srv != nil {
		srv.SetKeepAlivesEnabled(keep)
	}
}

// Refuse closes the listener and the idle connections, until Accept: connections
// are refused, while requests that run go on.
func (e *Engine) Refuse() {
	e.mu.Lock()
	ln := e.ln
	e.ln = nil
	e.mu.Unlock()
	if ln != nil {
		ln.Close()
	}
	e.SetKeepAlive(false)
}

// Block lets connections to the engine hang, until Accept: nobody accepts them,
// and its queue is full, so that not even the kernel answers. Idle connections
// are closed, requests that run go on. Where the system does not work so, it
// returns errors.ErrUnsupported.
func (e *Engine) Block() error {
	e.mu.Lock()
	ln := e.ln
	e.mu.Unlock()
	if ln == nil {
		return errors.New("engine does not listen")
	}
	if err := setBacklog(ln.Listener, 0); err != nil {
		return err
	}
	ln.close()
	hang := 0
	for range 64 {
		conn, err := net.DialTimeout("tcp", e.addr, 100*time.Millisecond)
		if err == nil {
			conn.Close() // it stays in the queue all the same
			hang = 0
			continue
		}
		if hang++; hang == 2 { // before the first, one may have been taken out
			e.SetKeepAlive(false)
			return nil
		}
	}
	ln.open()
	return errors.ErrUnsupported
}

// Accept ends what Refuse or Block began.
func (e *Engine) Accept() error {
	e.mu.Lock()
	srv, ln := e.srv, e.ln
	e.mu.Unlock()
	if srv == nil {
		return errors.New("engine is killed")
	}
	e.SetKeepAlive(true)
	if ln != nil {
		ln.open()
		return setBacklog(ln.Listener, 1024)
	}
	again, err := ListenAgain(e.addr)
	if err != nil {
		return err
	}
	gated := &gate{Listener: again}
	e.mu.Lock()
	e.ln = gated
	e.mu.Unlock()
	go srv.Serve(gated) //nolint:errcheck // it ends with Kill
	return nil
}
