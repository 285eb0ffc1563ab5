// Package plan reads a request into an immutable plan: what the client asks for, and what it
// is granted. It knows no worker, never waits and makes no requests.
package plan

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Plan is what a request asks for. It is complete when it is made, and does not change. Only
// its body passes to the dispatch.
type Plan struct {
	HTTP  *http.Request // that was read
	ID    string        // in logs, explanations and annotations
	API   api.API       // nil if the request passes through
	Name  string        // the API's name, or that of the path in package engine; may be empty
	Model string        // as engines know it; empty if the request names none
	// Public is the name that the client uses for the model, if the operator maps that one.
	Public string
	// Request is the parsed body of an inference request, other that of a request for
	// no known API. Both are nil if the router did not read or understand the body.
	Request *api.Request
	other   *api.Request
	Session Session
	// Opened returns the session of an id that the engine opens for the client itself; nil for
	// other requests.
	Opened   func(id string) Session
	Models   PublicModels // for the list of models
	Response string       // the id of what one engine keeps, such as a response or a job; empty if the request names none
	Pin      Pin
	Answer   *AnswerExt // what the answer must carry for the client, nil if nothing
	Fallback string     // why an inference request is routed by load alone

	Prompt
	Who
	Hints
	Content
	Handling
}

// Prompt is the scheduler's view of a request.
type Prompt struct {
	Score     kvscore.Request
	TextBlock int  // the size of the blocks of text, in bytes
	Given     bool // the ids of nvext.token_data are the prompt
}

// Hints is what the client asks of the router.
type Hints struct {
	Ext       *nvext.Ext   // only what is granted; never nil
	Grants    nvext.Grants // of what the request needs
	Dropped   nvext.Grants // what the request needs and is not granted
	headers   nvext.Grants // what its routing headers need
	Malformed []string     // routing headers that cannot be read
}

// Content is the request's body, and how it must be changed for the engine.
type Content struct {
	// Body can be sent on each attempt. It is nil if the router streams the client's body
	// through, which works once: then Once is that body.
	Body      *body.Replay
	Once      *body.Once
	hashing   api.Options  // of Request
	unread    string       // why the router could not read the body; empty if it could
	EditsBody bool         // the body must be changed for the engine
	Form      rawjson.Span // where a form has a public name
	// AsksUsage: the engine must be asked for usage, which the client did not ask for.
	AsksUsage bool
}

// Handling is how the router must treat the request.
type Handling struct {
	TakesSlot  bool // it counts against max_running
	Repeatable bool // it may be sent again after an attempt that reached a worker
	Isolated   bool // it goes only where its cache is kept apart
	Lists      bool // the answer is the list of models, to be completed
	Everywhere bool // it means all engines
	prefills   bool // an engine computes a prompt for it, and so fills its cache
	// ShowsHealth is set if the answer shows whether the engine computes. An engine whose
	// core is dead still answers GET requests and counts tokens.
	ShowsHealth bool
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

// Makes returns whether the engine may make something for the request that later ones name.
func (p *Plan) Makes() bool {
	return p.API == nil && (p.HTTP.Method == http.MethodPost || p.HTTP.Method == http.MethodPut)
}

// Infers returns whether an engine uses a model for the request.
func (p *Plan) Infers() bool { return p.prefills }

// steers returns whether the body has members that steer engines.
func (p *Plan) steers() bool {
	req := p.Parsed()
	return req != nil && req.Steers
}

// Salt returns what isolates the request's cache and sessions, in the router and in engines;
// empty if nothing does.
func (p *Plan) Salt() string {
	if req := p.Parsed(); req != nil {
		return p.Ext.Salt(req.Salt)
	}
	return p.Ext.Salt("")
}

// GiveBack returns what was read of the body to the request.
func (p *Plan) GiveBack() {
	if p.Body != nil || p.Once != nil {
		body.GiveBack(p.HTTP, p.Body, p.Once)
	}
}

// Close releases the request's body.
func (p *Plan) Close() {
	if p.Body != nil {
		p.Body.Done()
		p.Body = nil
	}
	p.Once.Done()
	if p.Request != nil {
		p.Request.Done()
	}
}

// OrUnplanned returns an API for the shape of its errors.
func OrUnplanned(a api.API) api.API {
	if a == nil {
		return api.Unplanned
	}
	return a
}

// WithoutRouting returns a request's header without the routing headers that the engine must
// not see. These are not granted, or choose a worker or a rank.
func (p *Plan) WithoutRouting(h http.Header) http.Header {
	if p.headers == 0 {
		return h
	}
	kept := maps.Clone(h) // the server's own is shared
	for name, values := range kept {
		switch needs := nvext.HeaderNeeds(name); {
		case needs == 0:
		case needs&nvext.Pins != 0 || needs&^p.Grants != 0:
			delete(kept, name)
		case len(values) > 1:
			kept[name] = []string{oneValue(values)}
		}
	}
	return kept
}

// Pin is the worker, the rank, or both that a request names.
type Pin struct {
	Named  bool // a worker
	Worker uint64
	Field  string // that names the worker
	Rank   nvext.Opt[uint32]
	// Prefill is the worker that the request names for its prefill, PrefillRank its rank.
	Prefill     nvext.Opt[uint64]
	PrefillRank nvext.Opt[uint32]
}

// errDirect is Dynamo's own text, which its users know
// (lib/llm/src/kv_router/push_router.rs).
//
//nolint:staticcheck // as Dynamo writes it
var errDirect = errors.New("Worker ID required (--direct-route) but none found in request. " +
	"Expected decode_worker_id or backend_instance_id to be set by external router (e.g., EPP).")

func (p *Plan) takePin() {
	e := p.Ext
	switch {
	case e.DecodeWorkerID.Set:
		p.Pin = Pin{Named: true, Worker: e.DecodeWorkerID.Value, Field: "nvext.decode_worker_id"}
	case e.BackendInstanceID.Set:
		p.Pin = Pin{Named: true, Worker: e.BackendInstanceID.Value, Field: "nvext.backend_instance_id"}
	}
	p.Pin.Rank, p.Pin.Prefill, p.Pin.PrefillRank = e.DPRank, e.PrefillWorkerID, e.PrefillDPRank
}

// PinsPrefill returns whether the request names a worker or rank for its prefill. sole: it is the
// one that it names for all, as the router's own answers do.
func (p *Plan) PinsPrefill() (pins, sole bool) {
	n := &p.Pin
	sole = n.Named && n.Prefill.Set && n.Prefill.Value == n.Worker && (!n.PrefillRank.Set || n.PrefillRank == n.Rank)
	return n.Prefill.Set || n.PrefillRank.Set, sole
}

// Constrained returns whether the client excludes workers.
func (p *Plan) Constrained() bool {
	return p.Ext.AllowedWorkerIDs != nil || p.Ext.RoutingConstraints.RequiredTaints != nil
}

// ErrNonePermitted returns the error of a request whose constraints no worker meets.
func (p *Plan) ErrNonePermitted() error {
	var wants []string
	if ids := p.Ext.AllowedWorkerIDs; ids != nil {
		wants = append(wants, fmt.Sprintf("nvext.allowed_worker_ids %v", ids[:min(len(ids), maxListed)]))
	}
	if taints := p.Ext.RoutingConstraints.RequiredTaints; taints != nil {
		taints = taints[:min(len(taints), maxListed)]
		wants = append(wants, fmt.Sprintf("nvext.routing_constraints.required_taints %q", taints))
	}
	return fmt.Errorf("no worker meets %s", strings.Join(wants, " and "))
}

// maxListed is how many ids or taints an error names.
const maxListed = 8

// AnswerExt is the nvext that the answer must carry, as far as the plan knows it.
type AnswerExt struct {
	Fields  nvext.Fields
	Events  []byte // the annotations of a stream, as events
	Fits    bool   // the API's answers have room for it
	Waiting uint64 // requests that waited when this one came
	IDs     []byte // the prompt's token ids as JSON, nil if they are not known
}

const (
	routersFields      = nvext.FieldWorkerID | nvext.FieldTiming | nvext.FieldTokenIDs
	routersAnnotations = nvext.AnnotationRequestID | nvext.AnnotationTokenIDs | nvext.AnnotationFormattedPrompt

	HeaderRequestID = "X-Request-Id"
	// maxRequestID is the longest id of a request that the router takes from its client, in bytes.
	maxRequestID = 128
	// maxTold is the longest prompt that an answer repeats, in bytes. It stays in memory as
	// long as the answer. A token id counts as eight.
	maxTold = 256 << 10
)

// answerExt returns the nvext of a request's answer, nil if none. It copies parts of the
// body, because the answer may outlive it.
func (rd *Reader) answerExt(id string, req *api.Request, ext *nvext.Ext, body []byte) *AnswerExt {
	fields, annotations := ext.ExtraFields&routersFields, ext.Annotations&routersAnnotations
	if !req.Stream {
		annotations = 0 // a plain answer has no events
	}
	if fields == 0 && annotations == 0 {
		return nil
	}
	x := &AnswerExt{Fields: fields, Waiting: rd.Waiting(), Fits: req.AnswerObject() != ""}
	if !x.Fits {
		return x
	}
	annotate := func(annotation nvext.Annotations, name string, payload []byte) {
		if annotations&annotation != 0 && payload != nil {
			x.Events = nvext.AppendAnnotation(x.Events, name, payload)
		}
	}
	if annotations&nvext.AnnotationRequestID != 0 {
		annotate(nvext.AnnotationRequestID, nvext.NameRequestID, rawjson.AppendString(nil, id))
	}
	if prompt := req.PromptText(body); len(prompt) <= maxTold {
		annotate(nvext.AnnotationFormattedPrompt, nvext.NameFormattedPrompt, prompt)
	}
	if fields&nvext.FieldTokenIDs != 0 || annotations&nvext.AnnotationTokenIDs != 0 {
		list := req.IDs(body)
		if ext.TokenSpan.End > 0 {
			list = ext.TokenSpan.Of(req.NVExt)
		}
		if ids, n := nvext.IDs(list); n <= maxTold/8 {
			x.IDs = ids
			annotate(nvext.AnnotationTokenIDs, nvext.NameTokenIDs, ids)
		}
	}
	return x
}

// requestID returns the client's id of a request, or a random one if the client's cannot be logged and shown.
func requestID(r *http.Request) string {
	id := r.Header.Get(HeaderRequestID) //nolint:canonicalheader // as Go spells it
	if id != "" && len(id) <= maxRequestID && strings.IndexFunc(id, func(r rune) bool { return r <= ' ' || r > '~' }) < 0 {
		return id
	}
	return strconv.FormatUint(rand.Uint64(), 16) //nolint:gosec // no secret
}
