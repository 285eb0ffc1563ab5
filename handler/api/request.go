package api

import (
	"encoding/binary"
	"errors"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Options are what a request is read with. They must be the same for all
// requests whose chains are to be compared.
type Options struct {
	// TextBlock is the size of a block of canonical text, in bytes, from 16
	// to 4096; values outside are moved to the nearer limit. Default: 64.
	TextBlock int
	// BlockSize is the size of a block of tokens, in tokens, at most 4096. It
	// must be the engines'. Default: 16.
	BlockSize int
	// Seed keys all hashes: of text, of token ids and of the root. It is drawn
	// once for the process, and is no one else's to know.
	Seed uint64
}

const (
	minTextBlock, maxTextBlock = 16, 4096
	maxBlockSize               = 4096

	// maxChoices keeps sums of choices from overflowing.
	maxChoices = 1 << 20
)

func (o Options) withDefaults() Options {
	if o.TextBlock <= 0 {
		o.TextBlock = 64
	}
	if o.BlockSize <= 0 {
		o.BlockSize = 16
	}
	o.TextBlock = min(max(o.TextBlock, minTextBlock), maxTextBlock)
	o.BlockSize = min(o.BlockSize, maxBlockSize)
	return o
}

// Kind says what a prompt's blocks are made of.
type Kind uint8

const (
	// None is a prompt without identity: there is none, or it is in a form
	// that is not understood. It is placed by load.
	None Kind = iota
	// Text is a prompt known by its canonical text.
	Text
	// Tokens is a prompt that the client sent as token ids.
	Tokens
)

// Request is what a request body says. It does not change once it is parsed.
// Its strings and slices may point into the body, which must stay as it is
// for as long as the Request is used.
type Request struct {
	// API is what the body was read as.
	API API
	// Model, LoRA (SGLang's lora_path) and Salt (cache_salt) are empty if the
	// body does not say them, or not as a string. What it says in another form
	// is in Root all the same.
	Model, LoRA, Salt string
	// OddSalt is what stands in place of a salt that is neither a string nor
	// null, its first 64 bytes; empty if there is no such thing.
	OddSalt string
	// Stream is whether the client asked for a stream of events.
	Stream bool
	// Choices is how many answers to one prompt are computed (the larger of n
	// and best_of), 1 unless said.
	Choices int
	// PreviousResponse (previous_response_id) and Conversation (conversation,
	// or its id) name history that one server keeps. If either is set the
	// prompt is not in the body, and Kind is None.
	PreviousResponse, Conversation string
	// Unstored is whether the client does not want its response kept by the
	// server (store), so that no later request names it.
	Unstored bool
	// CacheKey (prompt_cache_key), SessionID (session_id, or the id in
	// session_params) and UserID (metadata.user_id of Anthropic's Messages,
	// in which Claude Code writes its session) say whose turn this is, as the
	// client sent them; empty if it did not.
	CacheKey, SessionID, UserID string
	// SessionHeld is whether session_params names a session, whose state is in the
	// engine.
	SessionHeld bool
	// MaxTokens is the most tokens the answer may have; 0 is not said.
	MaxTokens int64

	// Kind says what Blocks are made of.
	Kind Kind
	// Blocks are the content hashes of the prompt's full blocks, in order, of
	// Options.TextBlock bytes or Options.BlockSize tokens each. Of a batch of
	// prompts it is the first one's.
	Blocks []uint64
	// Bytes is the length of the canonical text, in bytes, summed over a
	// batch. It is 0 if Kind is not Text.
	Bytes int64
	// Tokens is the exact number of prompt tokens, summed over a batch. It is
	// 0, which is unknown, if Kind is not Tokens.
	Tokens int64
	// Past is how far the (first) prompt goes on behind the last of Blocks, in
	// blocks.
	Past float32
	// First is the part of Bytes or Tokens that is the first prompt's.
	First int64
	// SkipsCache is whether the engine computes the whole prompt, whatever it has
	// cached: vLLM and SGLang for the log probabilities of prompt tokens, llama.cpp
	// if told so.
	SkipsCache bool
	// Truncated is whether the engine may cut the prompt (truncate_prompt_tokens):
	// then its count is not that of the text.
	Truncated bool
	// MediaEnd is where the last part that is not text ends in the canonical text,
	// in bytes; 0 if there is none.
	MediaEnd int64
	// Media is the number of parts that are not text (images, audio, files).
	// Their size is in neither Bytes nor Tokens.
	Media int
	// MediaTokens is an estimate of what they take, in tokens, from their
	// size: see medium.tokens for the rules. It is at most maxMediaTokens.
	MediaTokens int64
	// Root is the hash of what must agree before chains can be compared:
	// model, LoRA, salt, kind and block size, and what else changes the prompt
	// as a whole (chat_template, documents, reasoning_effort and so on).
	Root uint64
	// NVExt is the raw value of the last nvext member that is not null; nil
	// if there is none. An Editor takes all of them out.
	NVExt []byte
	// NullNVExt is whether there is an nvext member that is null.
	NullNVExt bool
	// Steers is whether there is a member by which some engine is told its
	// rank, its slot, a priority, or how long to keep what it has computed.
	Steers bool
	// Vertex is whether the body of no known API has Vertex AI's form. What its
	// `instances` and `parameters` say to the engine is not read.
	Vertex bool

	size    int          // of the body
	brace   int          // where the body's object opens
	closing int          // where its closing bracket is
	options rawjson.Span // stream_options
	given   rawjson.Span // the prompt, where the client gave it as one text
	prompts int          // in the batch
	answers int          // to each prompt that are sent back: n
	ids     rawjson.Span // the prompt's token ids, if Kind is Tokens and it is one prompt
	block   int          // what Root says of these three
	seed    uint64
	variant uint64 // of what changes the prompt as a whole, or the part of the cache that it is in
	written uint64 // of what changes how text becomes the prompt's tokens
	blended bool   // the engine computes more than the prompt's tokens, or it is not known which
	steady  bool   // prompt and answer together begin the next turn's prompt
	rest    Hasher // the prompt's text, to be continued
	tail    []byte // the prompt's ids behind the last of Blocks, as they are hashed

	memberCount int // of the body
	members     [keptMembers][3]uint32
}

// parse is the state of one Parse.
type parse struct {
	req  *Request
	opt  Options
	body []byte
	// main is the member that holds the prompt; system, tools and functions
	// may stand before it in the text; ids take its place; other is what it
	// is compared with, or may stand for it.
	main, system, tools, functions, ids, other rawjson.Span
	media                                      [3]rawjson.Span // beside the prompt: images, videos, audio
	template                                   bool            // the prompt is kept by the server
	echo, resume                               bool
	logprobs                                   bool  // completions: of the answer's tokens
	noTop                                      bool  // chat: top_logprobs is null
	returnLogprob                              bool  // generate
	logprobStart                               int64 // generate; -1 is none
	unlike                                     bool  // a part of the prompt is in a form that is not understood
	maxTokens                                  int64 // the older max_tokens
	hash                                       Hasher
}

// ErrMembers says that a body has more than 4096 members.
var ErrMembers = errors.New("too many members")

// ScanError is what Parse returns for a body that it cannot read. It wraps
// rawjson.ErrMalformed, rawjson.ErrDepth or ErrMembers.
type ScanError struct {
	// Offset is the byte of the body at which reading stopped.
	Offset int
	err    error
}

// Error names the reason and the offset.
func (e *ScanError) Error() string { return e.err.Error() + " at byte " + strconv.Itoa(e.Offset) }

// Unwrap returns the reason.
func (e *ScanError) Unwrap() error { return e.err }

// Parse reads a request body. Members that are absent, or of a type they
// should not be, are unknown and never an error: judging a request is the
// engine's. The error is a [*ScanError]: the body is not one JSON object, or
// nests too deeply; such a request has no plan.
func Parse(a API, body []byte, o Options) (*Request, error) {
	r := &Request{API: a, Choices: 1, size: len(body), prompts: 1, answers: 1}
	p := &parse{req: r, opt: o.withDefaults(), body: body, logprobStart: -1}
	if err := p.scan(); err != nil {
		return nil, err
	}
	if r.MaxTokens == 0 {
		r.MaxTokens = p.maxTokens
	}
	a.prompt(p)
	if p.unlike {
		r.Kind, r.Blocks, r.Bytes, r.Tokens = None, nil, 0, 0
	}
	r.SkipsCache = r.SkipsCache || p.skipsCache()
	r.blended = p.isBlended()
	if r.Kind == Text {
		r.Blocks, r.Past, r.First = p.hash.blocks, p.hash.past(), p.hash.Bytes()
		r.rest = p.hash
	}
	if a.Work() != Generate {
		r.Stream = false
	}
	r.steady = r.Kind == Text && a.Work() == Generate && r.Choices == 1 && r.prompts == 1 && !p.echo && !p.resume
	r.block, r.seed = p.opt.TextBlock, p.opt.Seed
	if r.Kind == Tokens {
		r.block = p.opt.BlockSize
	}
	r.Root = r.root()
	return r, nil
}

// scan walks the top-level members. It is the only pass over the whole body;
// what comes after it reads the prompt's spans only.
func (p *parse) scan() error {
	b := p.body
	c, ok := rawjson.Open(b)
	if !ok {
		return &ScanError{c.At, c.Err}
	}
	p.req.brace = c.At - 1
	for c.Next() {
		key := c.Key()
		v := c.Value()
		if c.Err != nil {
			break
		}
		if p.req.note(c.KeyAt, v); p.req.memberCount > maxMembers {
			return &ScanError{c.At, ErrMembers}
		}
		if string(key) == nameNVExt {
			if v.IsNull(b) {
				p.req.NullNVExt = true
			} else {
				p.req.NVExt = v.Of(b)
			}
			continue
		}
		p.field(key, v)
	}
	if c.Err != nil {
		return &ScanError{c.At, c.Err}
	}
	p.req.closing = c.At - 1
	if !c.Alone() {
		return &ScanError{rawjson.SkipSpace(b, c.At), rawjson.ErrMalformed}
	}
	return nil
}

// Model returns the model that a body names, which may be of any API, or "".
func Model(body []byte) string {
	c, _ := rawjson.Open(body)
	for c.Next() {
		is := string(c.Key()) == "model"
		if v := c.Value(); is {
			return v.Text(body)
		}
	}
	return ""
}

// field reads a member that all APIs share, and passes on the others.
func (p *parse) field(key []byte, v rawjson.Span) {
	r, b := p.req, p.body
	switch string(key) {
	case "model":
		r.Model = v.Text(b)
	case "lora_path":
		if r.LoRA = v.Text(b); r.LoRA == "" {
			p.vary(key, v) // a list, for a batch
		}
	case "cache_salt":
		r.OddSalt = ""
		if r.Salt = v.Text(b); r.Salt == "" {
			p.vary(key, v)
			if raw := v.Of(b); raw[0] != '"' && !v.IsNull(b) {
				r.OddSalt = string(raw[:min(len(raw), 64)])
			}
		}
	case "stream":
		r.Stream = isTrue(v.Of(b))
	case "stream_options":
		r.options = v
	case "prompt_cache_key":
		r.CacheKey = v.Text(b)
	case "session_id":
		r.SessionID = v.Text(b)
	case "session_params":
		p.session(v)
	case "echo":
		p.echo = isTrue(v.Of(b))
	case "cache_prompt":
		r.SkipsCache = r.SkipsCache || string(v.Of(b)) == "false"
	case "prompt_logprobs":
		r.SkipsCache = r.SkipsCache || !v.IsNull(b)
	case "continue_final_message":
		p.resume = isTrue(v.Of(b))
	case "n", "best_of":
		p.choices(v, len(key) == 1)
	case "max_completion_tokens", "max_output_tokens":
		if n, ok := integer(v.Of(b)); ok && n > 0 {
			r.MaxTokens = n
		}
	case "max_tokens":
		if n, ok := integer(v.Of(b)); ok && n > 0 {
			p.maxTokens = n
		}
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
		p.unlike = p.unlike || v.HasContent(b)
	default:
		if steers(key) {
			r.Steers = true
			return
		}
		r.API.field(p, key, v)
	}
}

// steers tells whether some engine is steered by a member of a name.
func steers(key []byte) bool {
	switch string(key) {
	case "priority", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "id_slot", "retention_seconds":
		return true
	}
	return false
}

// vary takes in a member that changes the prompt as a whole, or the part of
// the cache that it is looked for in.
func (p *parse) vary(key []byte, v rawjson.Span) {
	p.req.variant ^= p.digestOf(key, v) // in any order
}

// writing takes in a member that changes how text becomes the prompt's tokens:
// to a prompt of token ids it makes no difference.
func (p *parse) writing(key []byte, v rawjson.Span) {
	p.req.written ^= p.digestOf(key, v)
}

// digestOf returns a hash of a member, 0 if it has no value.
func (p *parse) digestOf(key []byte, v rawjson.Span) uint64 {
	if !v.HasContent(p.body) {
		return 0
	}
	var d digest
	d.add(key)
	d.add([]byte{markSep})
	d.addJSON(v.Of(p.body))
	sum := d.sum()
	return binary.LittleEndian.Uint64(sum[:])
}

// writingMembers takes in an object of such members. Whether to think is left
// out: templates say that at the prompt's end, and clients change it from turn
// to turn. An effort is the same under all of its names.
func (p *parse) writingMembers(key []byte, v rawjson.Span) {
	if v.First(p.body) != '{' {
		p.writing(key, v)
		return
	}
	c := rawjson.Enter(p.body, v.Start)
	for c.Next() {
		key := c.Key()
		v := c.Value()
		switch string(key) {
		case "enable_thinking", "thinking", "summary", "generate_summary", "format":
		case "effort":
			p.writing([]byte("reasoning_effort"), v)
		default:
			p.writing(key, v)
		}
	}
}

// choices reads a number of answers; sent is whether all of them are sent back.
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

// session reads session_params, in which SGLang's clients name a session.
func (p *parse) session(v rawjson.Span) {
	if v.First(p.body) != '{' {
		return
	}
	known := p.req.SessionID != ""
	c := rawjson.Enter(p.body, v.Start)
	for c.Next() {
		key := c.Key()
		v := c.Value()
		if k := string(key); k != "id" && k != "session_id" {
			continue
		}
		id := v.Text(p.body)
		p.req.SessionHeld = id != ""
		if !known {
			p.req.SessionID = id
		}
	}
}

// begin prepares the text hasher for a prompt of about size bytes of JSON.
func (p *parse) begin(size int) {
	// A big body is often a big image, which makes one block: reserve for a
	// usual text and let longer ones grow.
	const most = 4096
	p.hash = newHasher(p.opt.TextBlock, p.opt.Seed)
	p.hash.blocks = make([]uint64, 0, min(size/p.opt.TextBlock+1, most))
}

func isTrue(b []byte) bool { return string(b) == "true" }
func isNo(b []byte) bool   { return string(b) == "false" || string(b) == "null" }
