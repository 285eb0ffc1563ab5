package engine

import (
	"encoding/json"
	"net/http"
	"strings"
)

// asked is what tokenizers and renderers are asked for, in any flavour.
type asked struct {
	request
	AddSpecialTokens bool    `json:"add_special_tokens"`
	Content          *string `json:"content"`
}

// read reads the body. It answers with an error and returns nil if the body is not
// of this kind, or for a model that is not served.
func (x *exchange) read() *asked {
	r := new(asked)
	if err := json.Unmarshal(x.body, r); err != nil {
		x.reject(invalid("JSON decode error: %v", err))
		return nil
	}
	if _, aerr := x.engine.root(&request{Model: r.Model}); aerr != nil {
		x.reject(aerr)
		return nil
	}
	return r
}

// tokenize answers with the tokens of a chat or of a prompt, those that inference would use. Newer
// SGLangs take one of the two, older ones know no chats. A newer Dynamo has no special tokens to add.
func (x *exchange) tokenize() {
	r, f := x.read(), x.engine.cfg.Flavour
	switch {
	case r == nil:
	case f == LlamaCpp:
		tokens := []uint32{}
		if r.Content != nil {
			tokens = x.engine.tokenize(*r.Content)
		}
		x.value(object{"tokens": tokens})
	case f == SGLang && (r.Prompt == nil) == (r.Messages == nil):
		x.reject(badRequest("Exactly one of 'prompt' or 'messages' must be provided."))
	case f == Dynamo && (r.AddSpecialTokens || r.ContinueFinalMessage):
		x.reject(&apiError{http.StatusNotImplemented, "Not Implemented", "not supported", ""})
	default:
		if tokens, aerr := x.engine.tokens(&r.request, r.Messages != nil); aerr != nil {
			x.reject(aerr)
		} else {
			x.value(object{"count": len(tokens), "max_model_len": x.engine.cfg.MaxModelLen, "tokens": tokens})
		}
	}
}

// applyTemplate answers as llama.cpp does.
func (x *exchange) applyTemplate() {
	r := x.read()
	switch {
	case r == nil:
	case len(r.Messages) == 0:
		x.reject(badRequest("'messages' is required"))
	default:
		x.value(object{"prompt": renderChat(r.Messages, r.Tools, true, false)})
	}
}

// render answers as a vLLM does that runs with --enable-scale-out.
func (x *exchange) render() {
	if !x.engine.cfg.ScaleOut {
		x.reject(&apiError{http.StatusForbidden, "Forbidden", "Scale-out endpoints are disabled.", ""})
		return
	}
	r := x.read()
	if r == nil {
		return
	}
	chat := strings.HasPrefix(x.r.URL.Path, "/v1/chat")
	tokens, aerr := x.engine.tokens(&r.request, chat)
	doc := object{"request_id": "render-1", "token_ids": tokens, "sampling_params": object{"temperature": 1}, "model": r.Model, "stream": r.Stream}
	switch {
	case aerr != nil:
		x.reject(aerr)
	case chat:
		x.value(doc)
	default:
		x.value([]any{doc})
	}
}
