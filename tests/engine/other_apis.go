package engine

import (
	"encoding/json"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// shape is the API of an inference.
type shape int

const (
	notInference shape = iota
	completions
	chats
	responses
	messages
	generate
	tokensIn
)

var shapes = map[string]shape{
	"/v1/completions": completions, "/v1/chat/completions": chats, "/v1/responses": responses, "/v1/messages": messages,
}

// apis are how the answers of each look.
var apis = map[shape]canned.API{
	completions: canned.Completions, chats: canned.Chat, responses: canned.Responses, messages: canned.Messages,
	generate: canned.Generate, tokensIn: canned.TokensIn,
}

// shape returns the API of a path. Only an SGLang has /generate, and only a vLLM
// /inference/v1/generate.
func (c *Config) shape(path string) shape {
	switch {
	case path == "/generate" && (c.Flavour == SGLang || c.Flavour == OldSGLang):
		return generate
	case path == "/inference/v1/generate" && c.Flavour == VLLM:
		return tokensIn
	}
	return shapes[path]
}

// otherAPIs are the members by which the responses and messages APIs say what
// chats say otherwise.
type otherAPIs struct {
	Instructions    string          `json:"instructions"`
	Input           json.RawMessage `json:"input"`
	MaxOutputTokens *int            `json:"max_output_tokens"`
	System          content         `json:"system"`
}

// asChat says in a chat's members what a request of another API says.
func (r *request) asChat(s shape) *apiError {
	system := string(r.System)
	if s == responses {
		system = r.Instructions
		r.MaxTokens = r.MaxOutputTokens
		var text string
		if json.Unmarshal(r.Input, &text) == nil {
			r.Messages = []message{{Role: "user", Content: content(text)}}
		} else if err := json.Unmarshal(r.Input, &r.Messages); err != nil {
			return invalid("input: %v", err)
		}
	}
	for i, m := range r.Messages {
		if m.Role == "" {
			return badRequest("item %d: the model takes messages only", i)
		}
	}
	if system != "" {
		r.Messages = append([]message{{Role: "system", Content: content(system)}}, r.Messages...)
	}
	return nil
}
