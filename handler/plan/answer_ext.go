package plan

import (
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"

	"github.com/caddyserver/caddy/v2"
)

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
	// maxRequestID is the longest id of a request that an answer repeats, in bytes.
	maxRequestID = 256
	// maxTold is the longest prompt that an answer repeats, in bytes. It stays in memory as
	// long as the answer. A token id counts as eight.
	maxTold = 256 << 10
)

// answerExt returns the nvext of a request's answer, nil if none. It copies parts of the
// body, because the answer may outlive it.
func (rd *Reader) answerExt(r *http.Request, req *api.Request, ext *nvext.Ext, body []byte) *AnswerExt {
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
		if id := requestID(r); id != "" {
			annotate(nvext.AnnotationRequestID, nvext.NameRequestID, rawjson.AppendString(nil, id))
		}
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

// requestID returns the client's id of a request, else Caddy's. Caddy makes its id at the
// first call, and keeps it in the request's variables. It must do so before any attempt,
// because connections that are being made read these.
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
