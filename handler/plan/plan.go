// Package plan reads a request into an immutable plan: what the client asks for, and what it
// is trusted with. It knows no worker, never waits, and asks nobody.
package plan

import (
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Plan is what a request asks for. It is complete when it is made and does not
// change; only its body is handed over to the route.
type Plan struct {
	API   api.API // nil if the request passes through
	Name  string  // the API's name, or that of the path in package engine; may be empty
	Model string  // empty if the request names none
	// Request is the parsed body of an inference request, other that of a request for
	// no known API. Both are nil if the router did not read or understand the body.
	Request  *api.Request
	other    *api.Request
	Session  Session
	Response string // the id of the response that the request names, or empty
	Pin      Pin
	Answer   *AnswerExt // what the answer must carry for the client, nil if nothing
	Fallback string     // why an inference request is routed by load alone

	Prompt
	Wishes
	Content
	Handling
}

// Prompt is what the scheduler is told of a request.
type Prompt struct {
	Score     kvscore.Request
	TextBlock int  // the size of the blocks of text, in bytes
	Given     bool // the ids of nvext.token_data are the prompt
}

// Wishes is what the client says to the router.
type Wishes struct {
	Ext       *nvext.Ext   // as far as it is granted; never nil
	Grants    nvext.Grants // of what the request needs
	Dropped   nvext.Grants // what the request needs and is not granted
	headers   nvext.Grants // what its routing headers need
	Malformed []string     // routing headers that cannot be read
}

// Content is the request's body, and how it must be changed for the engine.
type Content struct {
	// Body can be sent on each attempt. It is nil if the client's body is streamed
	// through, which works once: then stream is that body.
	Body   *body.Replay
	Stream *body.Stream
	unread string // why the router could not read the body; empty if it could
	// EditsBody says that the engine must be told something in the body, or must not
	// see the body's nvext.
	EditsBody bool
	// AsksUsage says that ask must be made in the body: it asks the engine for usage that
	// the client did not ask for.
	AsksUsage bool
	AskUsage  rawjson.Edit
}

// Handling is how the router must treat the request.
type Handling struct {
	Computes   bool // it takes a slot of its worker
	Repeatable bool // it may be sent again after an attempt that reached a worker
	Isolated   bool // it goes only where its cache is kept apart
	Lists      bool // the answer is the list of models, to be completed
}

// Why an inference request has no prompt to compare.
const (
	fallbackCompressed = "compressed"
	fallbackOversized  = "oversized"
	fallbackMalformed  = "malformed"
	fallbackNoPrompt   = "no_prompt"
	FallbackMemory     = "memory" // too many bodies are in memory
)

// Parsed returns the parsed body, nil if there is none.
func (p *Plan) Parsed() *api.Request {
	if p.Request != nil {
		return p.Request
	}
	return p.other
}

// steers returns whether the body has members that steer engines.
func (p *Plan) steers() bool {
	req := p.Parsed()
	return req != nil && req.Steers
}

// Salt returns what keeps the request's cache and sessions apart, in the router and in
// engines; empty if nothing does.
func (p *Plan) Salt() string {
	if req := p.Parsed(); req != nil {
		return p.Ext.Salt(req.Salt)
	}
	return p.Ext.Salt("")
}

// GiveBack puts what was read of the request's body back.
func (p *Plan) GiveBack(r *http.Request) {
	if p.Body != nil || p.Stream != nil {
		body.GiveBack(r, p.Body, p.Stream)
	}
}

// Close releases the request's body.
func (p *Plan) Close() {
	if p.Body != nil {
		p.Body.Done()
		p.Body = nil
	}
	p.Stream.Done()
}
