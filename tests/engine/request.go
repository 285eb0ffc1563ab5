package engine

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
)

// request is the fields of an inference request that matter here. Others are
// ignored, as vLLM does.
type request struct {
	Model         string          `json:"model"`
	Messages      []message       `json:"messages"`
	Tools         json.RawMessage `json:"tools"`
	Prompt        json.RawMessage `json:"prompt"`
	Stream        bool            `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	MaxTokens            *int     `json:"max_tokens"`
	MaxCompletionTokens  *int     `json:"max_completion_tokens"`
	MinTokens            int      `json:"min_tokens"`
	IgnoreEOS            bool     `json:"ignore_eos"`
	N                    *int     `json:"n"`
	Seed                 int64    `json:"seed"`
	Priority             float64  `json:"priority"`
	CacheSalt            *string  `json:"cache_salt"`
	ReturnTokenIDs       bool     `json:"return_token_ids"`
	AddGenerationPrompt  *bool    `json:"add_generation_prompt"`
	ContinueFinalMessage bool     `json:"continue_final_message"`
	RoutedDPRank         *int     `json:"routed_dp_rank"`
	DataParallelRank     *int     `json:"data_parallel_rank"`
	InputIDs             []uint32 `json:"input_ids"`
	PromptTokenIDs       []uint32 `json:"prompt_token_ids"`
	Session              lenient  `json:"session_id"`
	otherAPIs
	ofGenerate
	ofTokensIn
	ofPhases
}

// call is an inference request as it was understood.
type call struct {
	shape    shape
	id       string
	model    string
	prompt   *cache.Prompt
	answer   []uint32
	reason   string // why the answer ends: stop or length
	rank     int    // -1: the engine chooses
	rankFrom string // where the rank was asked for: header or body
	stream   bool
	usage    bool
	tokenIDs bool
	asked    unanswered
	phase    phase
	// What a prefill phase adds to its answer and to its choice.
	inWhole, inChoice object
}

// unanswered is what a call's prompt and answer are made of.
type unanswered struct {
	request *request
	root    cache.Root
	tokens  []uint32 // without a session's context
	turn    *sessionParams
	session string // for the events; not that of SGLang's own sessions
}

// apiError is an error in vLLM's shape.
type apiError struct {
	status  int
	kind    string
	message string
	param   string // empty: null
}

func badRequest(format string, args ...any) *apiError {
	return &apiError{http.StatusBadRequest, "BadRequestError", fmt.Sprintf(format, args...), ""}
}

// invalid is the error of a body that does not have the right form.
func invalid(format string, args ...any) *apiError {
	return &apiError{http.StatusBadRequest, http.StatusText(http.StatusBadRequest), fmt.Sprintf(format, args...), ""}
}

// understand reads an inference request.
func (e *Engine) understand(s shape, body []byte, h http.Header) (*call, *apiError) {
	var r request
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, invalid("JSON decode error: %v", err)
	}
	if s == responses || s == messages {
		if aerr := r.asChat(s); aerr != nil {
			return nil, aerr
		}
	}
	if s == generate {
		r.asCompletion()
	}
	if s == tokensIn {
		r.tokensAsCompletion()
	}
	root, aerr := e.root(&r)
	if aerr != nil {
		return nil, aerr
	}
	c := &call{
		shape: s, model: r.Model, stream: r.Stream, usage: r.StreamOptions.IncludeUsage,
		tokenIDs: r.ReturnTokenIDs,
	}
	orDefault(&c.model, e.cfg.Model)
	if c.rank, c.rankFrom, aerr = e.pinned(s, &r, h); aerr != nil {
		return nil, aerr
	}
	tokens, aerr := e.tokens(&r, s.chatty())
	if ids := r.givenIDs(e.cfg.Flavour); s != completions && len(ids) > 0 {
		tokens, aerr = ids, nil // in place of what the template makes
	}
	if aerr != nil {
		return nil, aerr
	}
	if c.phase, aerr = e.phaseOf(s, &r); aerr != nil {
		return nil, aerr
	}
	c.asked = unanswered{&r, root, tokens, e.turn(s, &r), r.Session.text()}
	orDefault(&c.asked.session, h.Get("X-Session-ID")) //nolint:canonicalheader // as vLLM writes it
	switch id := e.requestID(h); {
	case r.RID != "" && e.cfg.Flavour == SGLang:
		c.id = r.RID
	case s == generate, s == tokensIn:
		c.id = id
	case s == completions:
		c.id = "cmpl-" + id
	default:
		c.id = "chatcmpl-" + id
	}
	return c, nil
}

// chatty returns whether prompts are made of messages.
func (s shape) chatty() bool { return s != completions && s != generate && s != tokensIn }

// answered gives a call its prompt, behind a session's context, and its answer.
func (e *Engine) answered(c *call, context []uint32) *apiError {
	tokens := slices.Concat(context, c.asked.tokens)
	length, aerr := e.answerLength(c.asked.request, c.shape.chatty(), len(tokens))
	if aerr != nil {
		return aerr
	}
	c.prompt = cache.NewPrompt(c.asked.root, tokens, e.cfg.BlockSize)
	c.prompt.Session = c.asked.session
	c.answer, c.reason = e.answer(c.prompt, c.asked.request, length)
	if c.phase.prefill && len(c.answer) > 1 {
		c.answer, c.reason = c.answer[:1], "length" // as an SGLang does whatever is asked for
	}
	return nil
}

// root checks which model is asked for, and what else vLLM does not accept.
func (e *Engine) root(r *request) (cache.Root, *apiError) {
	root := cache.Root{Model: e.cfg.Model}
	switch {
	case r.Model == "" || r.Model == e.cfg.Model:
	case slices.Contains(e.cfg.LoRAs, r.Model):
		root.LoRA = r.Model
	default:
		return root, e.unknownModel(r.Model)
	}
	if r.N != nil && *r.N != 1 {
		return root, badRequest("n must be 1, got %d: this engine gives one answer.", *r.N)
	}
	if r.Priority != 0 && e.cfg.Flavour == VLLM && !e.cfg.Priority {
		return root, badRequest("Got priority %v but priority scheduling is not enabled.", r.Priority)
	}
	if r.CacheSalt != nil {
		if n := len(*r.CacheSalt); n < 1 || n > 1024 {
			return root, badRequest("cache_salt must have 1 to 1024 characters.")
		}
		root.Salt = *r.CacheSalt
	}
	return root, nil
}

func (e *Engine) unknownModel(name string) *apiError {
	return &apiError{http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist.", name), "model"}
}

// pinned returns the rank that is asked for, and where; -1 if none is. It is in
// the header or, for an SGLang, in the body; the header counts more. An old
// SGLang knows no header, and the body's member by its old name. What is not a
// number is ignored in the header. vLLM's responses API knows no rank.
func (e *Engine) pinned(s shape, r *request, h http.Header) (int, string, *apiError) {
	var member *int
	switch e.cfg.Flavour {
	case VLLM:
		if s == responses {
			return -1, "", nil
		}
	case SGLang:
		if member = r.RoutedDPRank; member == nil {
			member = r.DataParallelRank
		}
	case OldSGLang:
		h, member = nil, r.DataParallelRank
	case TRTLLM, LlamaCpp, Dynamo:
		return -1, "", nil
	}
	from := "header"
	rank, err := strconv.Atoi(h.Get("X-data-parallel-rank")) //nolint:canonicalheader // as vLLM writes it
	if err != nil {
		if member == nil {
			return -1, "", nil
		}
		rank, from = *member, "body"
	}
	if rank < 0 || rank >= e.cfg.Ranks {
		return 0, "", badRequest("data_parallel_rank %d is out of range [0, %d).", rank, e.cfg.Ranks)
	}
	return rank, from, nil
}

// requestID returns the id that the client gave, or a new one.
func (e *Engine) requestID(h http.Header) string {
	if id := h.Get("X-Request-ID"); id != "" {
		return id
	}
	return fmt.Sprintf("%016x", mixed(e.ids.Add(1)))
}

// givenIDs returns the token ids that a chat gives in place of its messages, as an
// engine of a flavour takes them.
func (r *request) givenIDs(f Flavour) []uint32 {
	switch f {
	case SGLang, OldSGLang:
		return r.InputIDs
	case TRTLLM:
		return r.PromptTokenIDs
	case VLLM, LlamaCpp, Dynamo:
	}
	return nil
}

// tokens returns the tokens of a request's prompt.
func (e *Engine) tokens(r *request, chat bool) ([]uint32, *apiError) {
	if !chat {
		return e.promptTokens(r.Prompt)
	}
	if len(r.Messages) == 0 {
		return nil, invalid("messages: a list with at least one message is required")
	}
	generate := r.AddGenerationPrompt == nil || *r.AddGenerationPrompt
	if r.ContinueFinalMessage {
		if r.AddGenerationPrompt != nil && generate {
			return nil, invalid("add_generation_prompt and continue_final_message exclude each other")
		}
		generate = false
	}
	return e.tokenize(renderChat(r.Messages, r.Tools, generate, r.ContinueFinalMessage)), nil
}

// promptTokens returns the tokens of a prompt: text, token ids, or a list of one
// of these.
func (e *Engine) promptTokens(raw json.RawMessage) ([]uint32, *apiError) {
	var text string
	if json.Unmarshal(raw, &text) == nil && text != "" {
		return e.tokenize(text), nil
	}
	var ids []uint32
	if err := json.Unmarshal(raw, &ids); err == nil && len(ids) > 0 {
		return ids, nil
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || len(list) == 0 || len(list[0]) == 0 {
		return nil, invalid("prompt: a text, or a list of token ids from 0 to %d, is required", uint32(math.MaxUint32))
	}
	if list[0][0] != '[' && list[0][0] != '"' {
		return nil, invalid("prompt: token ids are integers from 0 to %d", uint32(math.MaxUint32))
	}
	if len(list) > 1 {
		return nil, badRequest("This engine takes one prompt, got %d.", len(list))
	}
	return e.promptTokens(list[0])
}

// answerLength returns how many tokens the answer may have at most.
func (e *Engine) answerLength(r *request, chat bool, prompt int) (int, *apiError) {
	limit, wanted := e.cfg.MaxModelLen-prompt, r.MaxTokens
	if chat && r.MaxCompletionTokens != nil {
		wanted = r.MaxCompletionTokens
	}
	if !chat && wanted == nil {
		n := max(1, min(16, limit)) // OpenAI's default for completions
		wanted = &n
	}
	asked := 1
	if wanted != nil {
		if asked = *wanted; asked < 1 {
			return 0, &apiError{http.StatusBadRequest, "BadRequestError", fmt.Sprintf("max_tokens must be at least 1, got %d.", asked), "max_tokens"}
		}
	}
	if asked > limit {
		return 0, &apiError{http.StatusBadRequest, "BadRequestError", fmt.Sprintf(
			"This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt contains %d input tokens.",
			e.cfg.MaxModelLen, asked, prompt), "input_tokens"}
	}
	if wanted != nil {
		limit = asked
	}
	if r.MinTokens > limit {
		return 0, badRequest("min_tokens must be at most max_tokens=%d, got %d.", limit, r.MinTokens)
	}
	return limit, nil
}
