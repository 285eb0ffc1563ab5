package engine

import (
	"encoding/json"
	"net/http"
)

// asked is what tokenizers and renderers are asked for, in any flavour.
type asked struct {
	request
	ReturnTokenStrs  bool    `json:"return_token_strs"`
	AddSpecialTokens *bool   `json:"add_special_tokens"`
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

// prompt returns the tokens of a chat, or else of a prompt, those that inference
// would use. It is not ok if it has answered with an error.
func (x *exchange) prompt(r *asked) (tokens []uint32, ok bool) {
	tokens, aerr := x.engine.tokens(&r.request, r.Messages != nil)
	if aerr != nil {
		x.reject(aerr)
		return nil, false
	}
	return tokens, true
}

// tokenize answers as vLLM does.
func (x *exchange) tokenize() {
	r := x.read()
	if r == nil {
		return
	}
	tokens, ok := x.prompt(r)
	if !ok {
		return
	}
	var strs []string
	if r.ReturnTokenStrs {
		for _, t := range tokens {
			strs = append(strs, tokenText(t))
		}
	}
	x.value(map[string]any{
		"count": len(tokens), "max_model_len": x.engine.cfg.MaxModelLen, "tokens": tokens, "token_strs": strs,
	})
}

// tokenizeSGLang answers as a newer SGLang does: older ones know no chats.
func (x *exchange) tokenizeSGLang() {
	r := x.read()
	if r == nil {
		return
	}
	if (r.Prompt == nil) == (r.Messages == nil) {
		x.reject(badRequest("Exactly one of 'prompt' or 'messages' must be provided."))
		return
	}
	if tokens, ok := x.prompt(r); ok {
		x.value(map[string]any{"tokens": tokens, "count": len(tokens), "max_model_len": x.engine.cfg.MaxModelLen})
	}
}

// tokenizeDynamo answers as a newer Dynamo does, which has no special tokens to
// add.
func (x *exchange) tokenizeDynamo() {
	r := x.read()
	if r == nil {
		return
	}
	if r.AddSpecialTokens != nil && *r.AddSpecialTokens || r.ContinueFinalMessage {
		x.reject(&apiError{http.StatusNotImplemented, "Not Implemented", "not supported", ""})
		return
	}
	x.tokenize()
}

// applyTemplate answers as llama.cpp does.
func (x *exchange) applyTemplate() {
	r := x.read()
	switch {
	case r == nil:
	case len(r.Messages) == 0:
		x.reject(badRequest("'messages' is required"))
	default:
		x.value(map[string]string{"prompt": renderChat(r.Messages, r.Tools, true, false)})
	}
}

// tokenizeContent answers as llama.cpp does.
func (x *exchange) tokenizeContent() {
	r := x.read()
	if r == nil {
		return
	}
	tokens := []uint32{}
	if r.Content != nil {
		tokens = x.engine.tokenize(*r.Content)
	}
	x.value(map[string]any{"tokens": tokens})
}

// renderedChat and renderedText answer as a vLLM does that runs with
// --enable-scale-out.
func (x *exchange) renderedChat() { x.render(true) }

func (x *exchange) renderedText() { x.render(false) }

func (x *exchange) render(chat bool) {
	if !x.engine.cfg.ScaleOut {
		x.reject(&apiError{http.StatusForbidden, "Forbidden", "Scale-out endpoints are disabled.", ""})
		return
	}
	r := x.read()
	if r == nil {
		return
	}
	tokens, aerr := x.engine.tokens(&r.request, chat)
	if aerr != nil {
		x.reject(aerr)
		return
	}
	doc := map[string]any{"request_id": "render-1", "token_ids": tokens, "sampling_params": map[string]any{"temperature": 1}, "model": r.Model, "stream": r.Stream}
	if chat {
		x.value(doc)
	} else {
		x.value([]any{doc})
	}
}
