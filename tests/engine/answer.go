package engine

import (
	"encoding/json"
	"slices"
	"strings"
)

// answer makes the bytes of an answer, in the shapes of vLLM.
type answer struct {
	*call
	created   int64
	blockSize int
	reasoning int // tokens of a chat's answer
	events    int // sent, of the responses API

	transfer      *kvTransfer    // of a vLLM's prefill phase
	disaggregated *disaggregated // of a TensorRT-LLM's
}

// other is whether the answer is of the responses or the messages API.
func (a *answer) other() bool { return a.shape == responses || a.shape == messages }

// document is an answer, or one chunk of a stream.
type document struct {
	ID                string   `json:"id"`
	Object            string   `json:"object"`
	Created           int64    `json:"created"`
	Model             string   `json:"model"`
	Choices           []choice `json:"choices"`
	Usage             *usage   `json:"usage,omitempty"`
	Timings           *timings `json:"timings,omitempty"` // of llama.cpp
	SystemFingerprint *string  `json:"system_fingerprint,omitempty"`
	// Only where vLLM has the field; there it is null unless it was asked for.
	PromptTokenIDs json.RawMessage `json:"prompt_token_ids,omitempty"`
	Transfer       *kvTransfer     `json:"kv_transfer_params,omitempty"`
}

type choice struct {
	Index        int     `json:"index"`
	Delta        *spoken `json:"delta,omitempty"`
	Message      *spoken `json:"message,omitempty"`
	Text         *string `json:"text,omitempty"`
	Logprobs     *string `json:"logprobs"`
	FinishReason *string `json:"finish_reason"`
	StopReason   *string `json:"stop_reason"`
	// A TensorRT-LLM's prefill phase has it.
	Disaggregated *disaggregated `json:"disaggregated_params,omitempty"`
	// Null unless asked for.
	TokenIDs       json.RawMessage `json:"token_ids"`
	PromptTokenIDs json.RawMessage `json:"prompt_token_ids,omitempty"`
}

type spoken struct {
	Role      string `json:"role,omitempty"`
	Content   string `json:"content"`
	Reasoning string `json:"reasoning_content,omitempty"`
}

type timings struct {
	Cached    int `json:"cache_n"`
	Computed  int `json:"prompt_n"`
	Predicted int `json:"predicted_n"`
}

type usage struct {
	Prompt     int         `json:"prompt_tokens"`
	Total      int         `json:"total_tokens"`
	Completion int         `json:"completion_tokens"`
	Details    usageDetail `json:"prompt_tokens_details"`
}

type usageDetail struct {
	Cached int `json:"cached_tokens"`
	// The full blocks that this prompt added to the cache, in tokens. vLLM says it
	// for chat alone.
	Created    *int `json:"created_cache_tokens"`
	Multimodal *int `json:"multimodal_tokens"`
}

var null = json.RawMessage("null")

// ids returns token ids as JSON, or null if they were not asked for.
func (a *answer) ids(tokens []uint32) json.RawMessage {
	if !a.tokenIDs {
		return null
	}
	out, _ := json.Marshal(slices.Concat([]uint32{}, tokens)) // [] and not null if there are none
	return out
}

// timings returns what llama.cpp adds to the last event, also of a stream without usage, and to
// plain answers. It is nil for other engines.
func (a *answer) timings(cached int) *timings {
	if !a.timed {
		return nil
	}
	return &timings{cached, len(a.prompt.Tokens) - cached, len(a.answer)}
}

// usageAt returns the usage after the given number of answer tokens.
func (a *answer) usageAt(tokens, cached int) *usage {
	n := len(a.prompt.Tokens)
	u := &usage{Prompt: n, Completion: tokens, Total: n + tokens, Details: usageDetail{Cached: cached}}
	if a.chat {
		created := max(0, n/a.blockSize*a.blockSize-cached)
		u.Details.Created = &created
	}
	return u
}

func (a *answer) document(chat, text string, choices ...choice) *document {
	d := &document{ID: a.id, Object: text, Created: a.created, Model: a.model, Choices: choices}
	if a.chat {
		d.Object = chat
	}
	if choices == nil {
		d.Choices = []choice{} // not null
	}
	return d
}

func (a *answer) chunk(choices ...choice) *document {
	return a.document("chat.completion.chunk", "text_completion", choices...)
}

// text returns the text of some tokens; the end token has none.
func text(tokens []uint32) string {
	return strings.TrimSuffix(detokenize(tokens), specials[endToken])
}

// appendChunk appends the event of token i. The first one of a chat has the
// role's event before it, and the last one has the reason of the end.
func (a *answer) appendChunk(buf []byte, i, cached int) []byte {
	if a.other() {
		return a.appendOther(buf, i)
	}
	if a.shape == generate {
		return a.appendGenerated(buf, i+1, cached)
	}
	if a.shape == tokensIn {
		return a.appendTokens(buf, i, cached)
	}
	if i == 0 && a.chat {
		d := a.chunk(choice{Delta: &spoken{Role: "assistant"}})
		d.PromptTokenIDs = a.ids(a.prompt.Tokens)
		d.Usage = a.running(0, cached)
		buf = appendEvent(buf, d)
	}
	token := a.answer[i : i+1]
	c, t := choice{TokenIDs: a.ids(token)}, text(token)
	if a.chat && i < a.reasoning {
		c.Delta = &spoken{Reasoning: t}
	} else if a.chat {
		c.Delta = &spoken{Content: t}
	} else {
		c.Text, c.PromptTokenIDs = &t, null
		if i == 0 {
			c.PromptTokenIDs = a.ids(a.prompt.Tokens)
		}
	}
	if i == len(a.answer)-1 {
		c.FinishReason = &a.reason
	}
	d := a.chunk(c)
	if i == len(a.answer)-1 {
		d.Timings = a.timings(cached)
	}
	d.Usage = a.running(i+1, cached)
	return appendEvent(buf, d)
}

// running returns the usage for a chunk in mid-stream; nil unless asked for.
func (a *answer) running(tokens, cached int) *usage {
	if !a.usage || !a.continuous {
		return nil
	}
	return a.usageAt(tokens, cached)
}

// appendEnd appends the end of a stream.
func (a *answer) appendEnd(buf []byte, cached int) []byte {
	if a.other() {
		return a.appendOtherEnd(buf, cached)
	}
	switch {
	case a.usage && a.shape == tokensIn:
		buf = a.appendTokensUsage(buf, cached)
	case a.usage:
		d := a.chunk()
		d.Usage = a.usageAt(len(a.answer), cached)
		buf = appendEvent(buf, d)
	}
	return append(buf, "data: [DONE]\n\n"...)
}

func appendEvent(buf []byte, d *document) []byte {
	data, _ := json.Marshal(d)
	buf = append(append(buf, "data: "...), data...)
	return append(buf, "\n\n"...)
}

// whole returns the body of an answer that is not streamed.
func (a *answer) whole(cached int) []byte {
	if a.other() {
		return a.otherWhole(cached)
	}
	if a.shape == generate {
		return a.generated(len(a.answer), cached)
	}
	if a.shape == tokensIn {
		return a.wholeTokens(cached)
	}
	c, t := choice{TokenIDs: a.ids(a.answer), FinishReason: &a.reason}, text(a.answer)
	if n := min(a.reasoning, len(a.answer)); a.chat {
		c.Message = &spoken{Role: "assistant", Content: text(a.answer[n:]), Reasoning: text(a.answer[:n])}
	} else {
		c.Text, c.PromptTokenIDs = &t, a.ids(a.prompt.Tokens)
	}
	d := a.document("chat.completion", "text_completion", c)
	if a.chat {
		d.PromptTokenIDs = a.ids(a.prompt.Tokens)
	}
	d.Transfer, d.Choices[0].Disaggregated = a.transfer, a.disaggregated
	if a.disaggregated != nil {
		d.PromptTokenIDs, _ = json.Marshal(a.prompt.Tokens)
	}
	d.Usage, d.Timings = a.usageAt(len(a.answer), cached), a.timings(cached)
	out, _ := json.Marshal(d)
	return out
}
