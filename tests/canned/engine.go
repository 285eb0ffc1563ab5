// Package canned is a plain mock of an LLM engine that speaks OpenAI's,
// Anthropic's and SGLang's APIs. It is a real server on a real socket. Its
// answers follow from the request alone. It keeps a journal of what it was
// sent, and has faults that a test switches on and off. It has no KV cache, no
// scheduler, no /metrics and no /tokenize. It is for tests of what a router
// does with requests, not of how well it places them.
package canned

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// EngineHeader is the response header in which an engine says its name.
const EngineHeader = "X-Engine"

// Pace says how long an engine's answers are and how fast they come. The zero
// value of a field is its default.
type Pace struct {
	// The words of an answer, each one content chunk of a stream. Default: 24.
	Words int
	// The time from having read a request to its first token; an answer that is
	// not streamed has its header after it. Default: none.
	FirstToken time.Duration
	// The time from one content chunk to the next. Default: none.
	PerWord time.Duration
	// The time from having read a request to the answer's header. Default: none.
	Header time.Duration
}

// Engine is one mock engine.
type Engine struct {
	Server
	name string

	hangsUp atomic.Bool // see HangUp

	mu       sync.Mutex
	pace     Pace
	fault    Fault
	faultFor int // requests that fault is for; -1 is all
	handler  http.Handler
	version  string // as reported to the router; empty: the engine reports none
	journal  []*Request
}

// Start starts an engine on a free loopback port.
func Start(name string) (*Engine, error) { return StartAt(name, "") }

// StartAt starts an engine at an address.
func StartAt(name, addr string) (*Engine, error) {
	e := &Engine{name: name}
	var used sync.Map // the connections that an answer was given on
	e.Handler = http.HandlerFunc(e.serveHTTP)
	e.ConnState = func(c net.Conn, s http.ConnState) {
		_, again := used.Load(c)
		switch {
		case s == http.StateActive && again && e.hangsUp.Load():
			c.Close()
		case s == http.StateIdle:
			used.Store(c, nil)
		case s == http.StateClosed, s == http.StateHijacked:
			used.Delete(c)
		}
	}
	return e, e.Server.Start(addr)
}

// Name returns the engine's name, which is in each answer's EngineHeader.
func (e *Engine) Name() string { return e.name }

// SetPace sets the pace of the requests that come after it.
func (e *Engine) SetPace(p Pace) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pace = p
}

// SetHandler lets h answer the requests, after they were read and entered in
// the journal; nil restores the engine's own answers.
func (e *Engine) SetHandler(h http.HandlerFunc) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.handler = nil
	if h != nil {
		e.handler = h
	}
}

// SetVersion lets the engine report its version to the router, as a vLLM does.
func (e *Engine) SetVersion(version string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.version = version
}

// next returns how the next request is to be answered.
func (e *Engine) next() (Pace, Fault, http.Handler) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f := e.fault
	switch {
	case e.faultFor > 0:
		e.faultFor--
	case e.faultFor == 0:
		f = Fault{}
	}
	p := e.pace
	if p.Words == 0 {
		p.Words = 24
	}
	return p, f, e.handler
}

func (e *Engine) serveHTTP(w http.ResponseWriter, r *http.Request) {
	if r.UserAgent() == "kv_router" { // the router's own: no test counts them, no fault is for them
		e.mu.Lock()
		version := e.version
		e.mu.Unlock()
		if r.URL.Path == "/v1/load_lora_adapter" {
			writeJSON(w, map[string]any{"uri": r.RequestURI})
			return
		}
		if r.URL.Path != "/version" || version == "" {
			http.NotFound(w, r)
			return
		}
		writeJSON(w, map[string]any{"version": version})
		return
	}
	rec, err := e.enter(r)
	stop := context.AfterFunc(r.Context(), func() { e.clientGone(rec) })
	defer func() {
		if !stop() || r.Context().Err() != nil {
			e.clientGone(rec) // this may be the first to notice it
		}
		e.finish(rec)
	}()
	if err != nil {
		return // the client left in mid-request
	}
	w.Header().Set(EngineHeader, e.name)
	pace, fault, h := e.next()
	if !pause(r.Context(), pace.Header) {
		return
	}
	switch {
	case e.fail(w, r, fault):
	case h != nil:
		r.Body = io.NopCloser(bytes.NewReader(rec.Body))
		h.ServeHTTP(w, r)
	default:
		e.answer(w, r, rec.Body, pace, fault)
	}
}

// pause waits for d, and says whether the client is still there.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
