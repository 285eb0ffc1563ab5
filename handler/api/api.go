package api

import (
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Work is what an engine does for a request, and so what is booked for it.
type Work uint8

const (
	// Count is no inference: the engine counts the prompt's tokens and
	// computes nothing. Such a request is read like the API that it counts
	// for, but has no chain (Kind None): place it by load, book nothing.
	Count Work = iota
	// Prefill is an inference that ends with the prompt: embeddings, scores,
	// classes. It has a chain, but no decode phase: expect no output blocks.
	// Its Request.Stream is always false.
	Prefill
	// Generate is an inference with an answer of tokens.
	Generate
)

// API is one of the clients' APIs. It is what For returns; the method set is
// closed, because a request's reading and an answer's observing belong to one
// another.
type API interface {
	// Name is short, constant and fit for a metric label: "chat",
	// "completions".
	Name() string
	// Work is what an engine does for a request.
	Work() Work

	// shape is how this API's clients expect errors.
	shape() shape
	// field notes where a top-level member is that only this API knows. Of
	// members of one name the last counts, as in the engines.
	field(p *parse, key []byte, v rawjson.Span)
	// prompt reads what field has noted into the request.
	prompt(p *parse)
	// begin writes what stands between a prompt and the text that answers it.
	begin(a *Answer)
	// event reads the object or array at b[i]: an event's data, or a plain
	// answer. It returns false if it is malformed.
	event(a *Answer, b []byte, i int) bool
}

// where is what may stand before an API's suffix in a path.
type where uint8

const (
	anywhere where = iota
	// versioned is nothing, or a path that ends in a version (/v1), in /openai
	// or in /deployments/{name} (Azure). It is for suffixes that also end
	// other paths: /v1/threads/{id}/messages is no inference.
	versioned
	// alone is nothing: /api/generate is Ollama's and reads otherwise.
	alone
)

// apis lists what For knows. Of two suffixes that both fit, the first wins.
var apis = [...]struct {
	suffix string
	where  where
	api    API
}{
	{"/chat/completions", anywhere, chat{}},
	{"/completions", anywhere, completions{}},
	{"/responses", versioned, responses{}},
	{"/messages", versioned, messages{}},
	{"/messages/count_tokens", versioned, countTokens{}},
	{"/inference/v1/generate", anywhere, tokensIn{}},
	{"/generate", alone, generate{}},
	{"/embeddings", versioned, pooled{"embeddings"}},
	{"/rerank", versioned, scored{"rerank"}},
	{"/score", versioned, scored{"score"}},
	{"/classify", versioned, pooled{"classify"}},
	{"/pooling", versioned, pooled{"pooling"}},
}

// For returns the API that a request path belongs to, or nil if a POST to it
// is no inference request. Before what names the API anything that usually
// stands there may stand (/v1, /openai/v1, nothing). The method is the
// caller's to check: a GET of such a path is no inference either.
func For(path string) API {
	for i := range apis {
		e := &apis[i]
		if prefix, ok := strings.CutSuffix(path, e.suffix); ok && e.where.allows(prefix) {
			return e.api
		}
	}
	return nil
}

func (w where) allows(prefix string) bool {
	if prefix == "" || w == anywhere {
		return true
	}
	if w == alone {
		return false
	}
	slash := strings.LastIndexByte(prefix, '/')
	last := prefix[slash+1:]
	if number, ok := strings.CutPrefix(last, "v"); ok && number != "" {
		switch strings.TrimLeft(number, "0123456789") {
		case "", "beta", "alpha":
			return true
		}
	}
	return last == "openai" || slash > 0 && last != "" && strings.HasSuffix(prefix[:slash], "/deployments")
}
