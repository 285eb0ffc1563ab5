package api

import (
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// field reads a member that all APIs share, or lets the API read it.
func (p *parse) field(key []byte, v rawjson.Span) {
	r, b := p.req, p.body
	switch string(key) {
	case "model":
		r.Model = v.Text(b)
	case "lora_path":
		if r.LoRA = v.Text(b); r.LoRA == "" {
			p.vary(key, v) // a batch has a list
		}
	case "cache_salt":
		if r.Salt = v.Text(b); r.Salt == "" {
			p.vary(key, v)
		}
	case "input_ids", "prompt_token_ids":
		p.ids = v
	case "stream":
		r.Stream = isTrue(v.Of(b))
	case "stream_options":
		r.options = v
	case "prompt_cache_key":
		r.CacheKey = v.Text(b)
	case "session_id":
		if !r.SessionHeld {
			r.SessionID = v.Text(b)
		}
	case "session_params":
		p.session(v)
	case "echo":
		p.echo = isTrue(v.Of(b))
		r.Echoes = p.echo
	case "cache_prompt":
		r.SkipsCache = r.SkipsCache || string(v.Of(b)) == "false"
	case "prompt_logprobs":
		r.SkipsCache = r.SkipsCache || !v.IsNull(b)
	case "continue_final_message":
		p.resume = isTrue(v.Of(b))
	case "n", "best_of":
		p.choices(v, len(key) == 1)
	case "max_completion_tokens", "max_output_tokens":
		p.limit(&r.MaxTokens, v)
	case "max_tokens":
		p.limit(&p.maxTokens, v)
	case "truncate_prompt_tokens":
		r.Truncated = !v.IsNull(b)
		p.vary(key, v)
	case "lora_request", "lora", "extra_key", "suffix":
		p.vary(key, v)
	case "chat_template", "reasoning_effort", "add_special_tokens", "mm_processor_kwargs", "item_first":
		p.writing(key, v)
	case "chat_template_kwargs", "reasoning", "output_config":
		p.writingMembers(key, v)
	case "prompt_embeds", "input_embeds":
		p.opaque = p.opaque || v.HasContent(b)
	case "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disaggregated_params":
		r.Steers, r.NamesPhases = true, r.NamesPhases || !v.IsNull(b)
	case "priority", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "id_slot", "retention_seconds":
		r.Steers = true
	case "vllm_xargs":
		r.Steers = r.Steers || !v.IsNull(b)
	case "sampling_params":
		r.Steers = r.Steers || r.API.Name() == NameTokens // it may have vLLM's extra_args
		r.API.field(p, key, v)
	default:
		r.API.field(p, key, v)
	}
}

func (p *parse) limit(to *int64, v rawjson.Span) {
	if n, ok := integer(v.Of(p.body)); ok && n > 0 {
		*to = n
	}
}

// vary records a member that changes the whole prompt, or selects the part of the
// cache in which the engine looks for it. The members' order does not matter.
func (p *parse) vary(key []byte, v rawjson.Span) { p.req.cacheVariant ^= p.digestOf(key, v) }

// writing records a member that changes how text becomes the prompt's tokens. It
// does not change a prompt of token ids.
func (p *parse) writing(key []byte, v rawjson.Span) { p.req.templateVariant ^= p.digestOf(key, v) }

// digestOf returns a hash of a member, 0 if it has no value.
func (p *parse) digestOf(key []byte, v rawjson.Span) uint64 {
	if !v.HasContent(p.body) {
		return 0
	}
	var d digest
	d.add(key)
	d.add([]byte{markSep})
	d.addJSON(v.Of(p.body))
	return d.sum64()
}

// writingMembers records an object of such members. It omits whether to think:
// templates write that at the prompt's end, and clients change it between turns.
// An effort is the same under all of its names.
func (p *parse) writingMembers(key []byte, v rawjson.Span) {
	if v.First(p.body) != '{' {
		p.writing(key, v)
		return
	}
	for key, v := range v.Members(p.body) {
		switch string(key) {
		case "enable_thinking", "thinking", "summary", "generate_summary", "format":
		case "effort":
			p.writing([]byte("reasoning_effort"), v)
		default:
			p.writing(key, v)
		}
	}
}

// choices reads a number of answers. With sent, the client gets all of them.
func (p *parse) choices(v rawjson.Span, sent bool) {
	n, ok := integer(v.Of(p.body))
	if !ok || n <= 0 {
		return
	}
	n = min(n, maxChoices)
	p.req.Choices = max(p.req.Choices, int(n))
	if sent {
		p.req.answers = int(n)
	}
}

// session reads session_params, in which SGLang's clients name a session. It has precedence over
// the member session_id.
func (p *parse) session(v rawjson.Span) {
	p.req.SessionList = v.First(p.body) == '['
	for key, v := range v.Members(p.body) {
		if k := string(key); k != "id" && k != "session_id" {
			continue
		}
		if id := v.Text(p.body); id != "" {
			p.req.SessionHeld, p.req.SessionID = true, id
		}
	}
}

func isTrue(b []byte) bool { return string(b) == "true" }
func isNo(b []byte) bool   { return string(b) == "false" || string(b) == "null" }

// integer reads a whole JSON number, also one that is written as 1e3 or 5.0.
func integer(b []byte) (int64, bool) {
	if len(b) == 0 || b[0] != '-' && (b[0] < '0' || b[0] > '9') {
		return 0, false
	}
	s := rawjson.View(b)
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		return n, true
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || f != float64(int64(f)) || f >= 1<<63 || f < -1<<63 {
		return 0, false
	}
	return int64(f), true
}
