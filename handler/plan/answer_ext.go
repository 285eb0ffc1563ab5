package plan

import (
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"

	"github.com/caddyserver/caddy/v2"
)

// AnswerExt is what the answer must carry for the client, of what the router can say.
type AnswerExt struct {
	Fields      nvext.Fields
	Annotations nvext.Annotations
	Fits        bool   // the API's answers have room for it
	ID          string // the request's; empty if it is not wanted
	Waiting     uint64 // requests that waited when this one came
	IDs         []byte // the prompt's token ids as JSON, nil if they are not known
	Prompt      []byte // the prompt's text as JSON, nil if it is not known
}

const (
	routersFields      = nvext.FieldWorkerID | nvext.FieldTiming | nvext.FieldTokenIDs
	routersAnnotations = nvext.AnnotationRequestID | nvext.AnnotationTokenIDs | nvext.AnnotationFormattedPrompt

	HeaderRequestID = "X-Request-Id"
	// maxRequestID is the longest id of a request that an answer repeats, in bytes.
	maxRequestID = 256
	// maxTold is the longest prompt that an answer repeats, in bytes: it stays in memory
	// as long as the answer lasts. A token id counts eight.
	maxTold = 256 << 10
)

// answerExt returns what the answer to a request must carry, nil if nothing. It copies
// what it needs of the body, because the answer may outlive it.
func (rd *Reader) answerExt(r *http.Request, req *api.Request, ext *nvext.Ext, body []byte) *AnswerExt {
	fields, annotations := ext.ExtraFields&routersFields, ext.Annotations&routersAnnotations
	if !req.Stream {
		annotations = 0 // a plain answer has no events
	}
	if fields == 0 && annotations == 0 {
		return nil
	}
	x := &AnswerExt{Fields: fields, Annotations: annotations, Waiting: rd.Waiting(), Fits: req.AnswerObject() != ""}
	if !x.Fits {
		return x
	}
	if annotations&nvext.AnnotationRequestID != 0 {
		x.ID = requestID(r)
	}
	if fields&nvext.FieldTokenIDs != 0 || annotations&nvext.AnnotationTokenIDs != 0 {
		ids := nvext.AppendIDs(nil, req.NVExt, ext.TokenSpan)
		if raw := req.AppendTokens(nil, body); ids == nil && raw != nil {
			ids = nvext.AppendIDs(nil, raw, rawjson.Span{End: len(raw)})
		}
		if ids != nil && len(ids) <= maxTold/8 {
			x.IDs = nvext.AppendTokens(nil, ids)
		}
	}
	if annotations&nvext.AnnotationFormattedPrompt != 0 {
		if prompt := req.PromptText(body); len(prompt) <= maxTold {
			x.Prompt = slices.Clone(prompt)
		}
	}
	return x
}

// requestID returns the client's id of a request, else the one for access logs. Caddy
// makes that when it is first read and keeps it among the request's variables, which
// connections in the making read: it must be made before any attempt.
func requestID(r *http.Request) string {
	if id := r.Header.Get(HeaderRequestID); id != "" && len(id) <= maxRequestID { //nolint:canonicalheader // it is
		return id
	}
	repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return ""
	}
	id, _ := repl.GetString("http.request.uuid")
	return id
}
