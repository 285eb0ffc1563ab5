package canned

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"
)

// Server is an HTTP server on the loopback. Its address stays the same over Kill and Restart.
type Server struct {
	Handler     http.Handler
	IdleTimeout time.Duration
	ConnState   func(net.Conn, http.ConnState)

	addr string
	mu   sync.Mutex
	srv  *http.Server // nil while killed
	ln   *gate        // nil while killed or refusing
}

// Start starts the server at an address. Empty: at a free port, see [Listen].
func (s *Server) Start(addr string) (err error) {
	var ln net.Listener
	if addr == "" {
		ln, err = Listen()
	} else {
		ln, err = net.Listen("tcp", addr)
	}
	if err == nil {
		s.addr = ln.Addr().String()
		s.serve(ln)
	}
	return err
}

// Addr returns the server's host:port.
func (s *Server) Addr() string { return s.addr }

func (s *Server) serve(ln net.Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.srv == nil {
		s.srv = &http.Server{
			Handler: s.Handler, IdleTimeout: s.IdleTimeout, ConnState: s.ConnState, ReadHeaderTimeout: time.Minute,
			ErrorLog: log.New(io.Discard, "", 0), // broken connections are the purpose
		}
	}
	s.ln = &gate{Listener: ln}
	go s.srv.Serve(s.ln) //nolint:errcheck // it ends with Kill or Refuse
}

// Kill ends the server as the end of its process would: the listener and all
// connections are closed at once, whatever they are at.
func (s *Server) Kill() {
	s.mu.Lock()
	srv, ln := s.srv, s.ln
	s.srv, s.ln = nil, nil
	s.mu.Unlock()
	if srv != nil {
		srv.Close()
	}
	if ln != nil {
		ln.open()
	}
}

// Restart brings a killed server back at the same address.
func (s *Server) Restart() error {
	ln, err := ListenAgain(s.addr)
	if err == nil {
		s.serve(ln)
	}
	return err
}

func (s *Server) killed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.srv == nil
}

// ListenAgain listens at a server's address, which its own connections of
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
func (s *Server) SetKeepAlive(keep bool) {
	s.mu.Lock()
	srv := s.srv
	s.mu.Unlock()
	if srv != nil {
		srv.SetKeepAlivesEnabled(keep)
	}
}

// Refuse closes the listener and the idle connections, until Accept: connections
// are refused, while requests that run go on.
func (s *Server) Refuse() {
	s.mu.Lock()
	ln := s.ln
	s.ln = nil
	s.mu.Unlock()
	if ln != nil {
		ln.Close()
	}
	s.SetKeepAlive(false)
}

// Block lets connections to the server hang, until Accept: nobody accepts them,
// and its queue is full, so that not even the kernel answers. Idle connections
// are closed, requests that run go on. Where the system does not work so, it
// returns errors.ErrUnsupported.
func (s *Server) Block() error {
	s.mu.Lock()
	ln := s.ln
	s.mu.Unlock()
	if ln == nil {
		return errors.New("server does not listen")
	}
	if err := setBacklog(ln.Listener, 0); err != nil {
		return err
	}
	ln.close()
	hang := 0
	for range 64 {
		conn, err := net.DialTimeout("tcp", s.addr, 100*time.Millisecond)
		if err == nil {
			conn.Close() // it stays in the queue all the same
			hang = 0
			continue
		}
		if hang++; hang == 2 { // before the first, one may have been taken out
			s.SetKeepAlive(false)
			return nil
		}
	}
	ln.open()
	return errors.ErrUnsupported
}

// Accept ends what Refuse or Block began. A killed server stays so.
func (s *Server) Accept() error {
	s.mu.Lock()
	srv, ln := s.srv, s.ln
	s.mu.Unlock()
	if srv == nil {
		return nil
	}
	srv.SetKeepAlivesEnabled(true)
	if ln == nil {
		return s.Restart()
	}
	if ln.open() {
		return setBacklog(ln.Listener, 1024)
	}
	return nil
}

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
	g.shut = make(chan struct{})
}

// open returns whether the gate was shut.
func (g *gate) open() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut == nil {
		return false
	}
	close(g.shut)
	g.shut = nil
	return true
}
