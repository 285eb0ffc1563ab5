package handler

import (
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"

	"github.com/caddyserver/caddy/v2"
)

// answerExt is what the nvext of a request asks its answer to carry, as far as
// it is the router's to say.
type answerExt struct {
	fields      nvext.Fields
	annotations nvext.Annotations
	fits        bool   // the API's answers have room for it
	id          string // the request's; empty if it is not wanted
	waiting     uint64 // requests that waited when this one came
	ids         []byte // the prompt's token ids as JSON, nil if they are not known
	prompt      []byte // the prompt's text as JSON, nil if it is not known
}

const (
	routersFields      = nvext.FieldWorkerID | nvext.FieldTiming | nvext.FieldTokenIDs
	routersAnnotations = nvext.AnnotationRequestID | nvext.AnnotationTokenIDs | nvext.AnnotationFormattedPrompt
)

// headerRequestID is where clients say the id of their request.
const headerRequestID = "X-Request-Id"

// maxRequestID is the longest id of a request that is told again, in bytes.
const maxRequestID = 256

// maxTold is the longest prompt that an answer repeats, in bytes: it is kept as
// long as the answer lasts. A token id counts eight.
const maxTold = 256 << 10

// answerExt takes in what the answer to a request is to carry, nil if it is
// nothing. It copies what it needs of the body, which the answer may outlive.
func (h *Handler) answerExt(r *http.Request, req *api.Request, ext *nvext.Ext, body []byte) *answerExt {
	fields, annotations := ext.ExtraFields&routersFields, ext.Annotations&routersAnnotations
	if !req.Stream {
		annotations = 0 // a plain answer has no events
	}
	if fields == 0 && annotations == 0 {
		return nil
	}
	x := &answerExt{fields: fields, annotations: annotations, waiting: uint64(max(0, h.pool.queue.length.Load()))}
	switch req.API.Name() {
	case "chat", "completions":
		x.fits = true
	default:
		return x // others' clients do not expect it
	}
	if annotations&nvext.AnnotationRequestID != 0 {
		x.id = requestID(r)
	}
	if fields&nvext.FieldTokenIDs != 0 || annotations&nvext.AnnotationTokenIDs != 0 {
		ids := nvext.AppendIDs(nil, req.NVExt, ext.TokenSpan)
		if raw := req.AppendTokens(nil, body); ids == nil && raw != nil {
			ids = nvext.AppendIDs(nil, raw, rawjson.Span{End: len(raw)})
		}
		if ids != nil && len(ids) <= maxTold/8 {
			x.ids = nvext.AppendTokens(nil, ids)
		}
	}
	if annotations&nvext.AnnotationFormattedPrompt != 0 {
		if prompt := req.PromptText(body); len(prompt) <= maxTold {
			x.prompt = slices.Clone(prompt)
		}
	}
	return x
}

// requestID returns the id of a request as its client has it, else as access logs
// may have it. That is made here, before any attempt: it is kept among the
// request's variables, which connections that are still being made look into.
func requestID(r *http.Request) string {
	if id := r.Header.Get(headerRequestID); id != "" && len(id) <= maxRequestID { //nolint:canonicalheader // it is
		return id
	}
	repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return ""
	}
	id, _ := repl.GetString("http.request.uuid")
	return id
}
