package handler

import (
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// plan is what a request asks for. It is complete when it is made and does not
// change; only its body is handed over to the route.
type plan struct {
	api   api.API // nil if the request passes through
	name  string  // the API's name, or that of the path in package engine; may be empty
	model string  // empty if the request names none
	// request is the parsed body of an inference request, other that of a request for
	// no known API. Both are nil if the router did not read or understand the body.
	request  *api.Request
	other    *api.Request
	session  session
	response string // the id of the response that the request names, or empty
	pin      pin
	answer   *answerExt // what the answer must carry for the client, nil if nothing
	fallback string     // why an inference request is routed by load alone

	prompt
	wishes
	content
	handling
}

// prompt is what the scheduler is told of a request.
type prompt struct {
	score     kvscore.Request
	textBlock int  // the size of the blocks of text, in bytes
	given     bool // the ids of nvext.token_data are the prompt
}

// wishes is what the client says to the router.
type wishes struct {
	ext       *nvext.Ext   // as far as it is granted; never nil
	grants    nvext.Grants // of what the request needs
	dropped   nvext.Grants // what the request needs and is not granted
	headers   nvext.Grants // what its routing headers need
	malformed []string     // routing headers that cannot be read
}

// content is the request's body, and how it must be changed for the engine.
type content struct {
	// body can be sent on each attempt. It is nil if the client's body is streamed
	// through, which works once: then stream is that body.
	body   *body.Replay
	stream *body.Stream
	unread string // why the router could not read the body; empty if it could
	// editsBody says that the engine must be told something in the body, or must not
	// see the body's nvext.
	editsBody bool
	// asked says that ask must be made in the body: it asks the engine for usage that
	// the client did not ask for.
	asked bool
	ask   rawjson.Edit
}

// handling is how the router must treat the request.
type handling struct {
	computes   bool // it takes a slot of its worker
	repeatable bool // it may be sent again after an attempt that reached a worker
	isolated   bool // it goes only where its cache is kept apart
	lists      bool // the answer is the list of models, to be completed
}

// Why an inference request has no prompt to compare.
const (
	fallbackCompressed = "compressed"
	fallbackOversized  = "oversized"
	fallbackMalformed  = "malformed"
	fallbackNoPrompt   = "no_prompt"
	fallbackMemory     = "memory" // too many bodies are in memory
)

// parsed returns the parsed body, nil if there is none.
func (p *plan) parsed() *api.Request {
	if p.request != nil {
		return p.request
	}
	return p.other
}

// steers returns whether the body has members that steer engines.
func (p *plan) steers() bool {
	req := p.parsed()
	return req != nil && req.Steers
}

// salt returns what keeps the request's cache and sessions apart, in the router and in
// engines; empty if nothing does.
func (p *plan) salt() string {
	if req := p.parsed(); req != nil {
		return p.ext.Salt(req.Salt)
	}
	return p.ext.Salt("")
}

// giveBack puts what was read of the request's body back.
func (p *plan) giveBack(r *http.Request) {
	if p.body != nil || p.stream != nil {
		body.GiveBack(r, p.body, p.stream)
	}
}

// done releases the request's body.
func (p *plan) done() {
	if p.body != nil {
		p.body.Done()
		p.body = nil
	}
	p.stream.Done()
}
