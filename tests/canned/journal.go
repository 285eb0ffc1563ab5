package canned

import (
	"io"
	"net/http"
	"time"
)

// Request is what an engine saw of one request.
type Request struct {
	Method string
	// URI is the request's target as it was sent, with its query.
	URI    string
	Header http.Header
	// Body is the body as it was sent: not decompressed.
	Body []byte
	// Left is when the client went away before its answer had ended; zero if it
	// stayed.
	Left time.Time

	done bool // the answer has ended
}

// enter reads a request into the journal.
func (e *Engine) enter(r *http.Request) (*Request, error) {
	rec := &Request{Method: r.Method, URI: r.RequestURI, Header: r.Header.Clone()}
	body, err := io.ReadAll(r.Body)
	e.mu.Lock()
	defer e.mu.Unlock()
	rec.Body = body
	e.journal = append(e.journal, rec)
	return rec, err
}

// clientGone notes that the client of a request that is being answered left.
func (e *Engine) clientGone(rec *Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !rec.done && rec.Left.IsZero() && !e.killed() { // a killed engine ends it by itself
		rec.Left = time.Now()
	}
}

// finish notes that the answer to a request has ended.
func (e *Engine) finish(rec *Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	rec.done = true
}

// Journal returns what the engine was sent so far, in order.
func (e *Engine) Journal() []Request {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make([]Request, len(e.journal))
	for i, r := range e.journal {
		out[i] = *r
	}
	return out
}

// Requests returns how many requests the engine was sent so far.
func (e *Engine) Requests() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.journal)
}

// Active returns how many requests the engine is answering.
func (e *Engine) Active() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, r := range e.journal {
		if !r.done {
			n++
		}
	}
	return n
}
