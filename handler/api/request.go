package api

import (
	"cmp"
	"errors"
	"math"
	"sync"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"
)

// Options are what a request is read with. Chains can be compared only between
// requests with the same Options.
type Options struct {
	// TextBlock is the size of a block of canonical text, in bytes. Default: 64.
	TextBlock int
	// BlockSize is the size of a block of tokens, in tokens. It must be the
	// engines'. Default: 16.
	BlockSize int
	// Sizes are further sizes of blocks of tokens, for Request.Chains. BlockSize may be
	// among them.
	Sizes []int
	// Seed keys all hashes: of text, of token ids and of the root. Draw one for
	// the process, and keep it secret.
	Seed uint64
}

const (
	// keptMembers is how many members of a body Parse remembers. An Editor searches
	// larger bodies, which no usual client sends, again.
	keptMembers = 16
	// maxMembers bounds the members of a body. Each costs more memory than it takes in the body.
	maxMembers = 4096

	nameNVExt = "nvext"
)

// maxChoices keeps sums of choices from overflowing.
const maxChoices = 1 << 20

func (o Options) withDefaults() Options {
	o.TextBlock, o.BlockSize = cmp.Or(o.TextBlock, 64), cmp.Or(o.BlockSize, 16)
	return o
}

// AnswerObject returns the member object of the API's answers to the request. It is
// empty for an API whose answers carry no nvext.
func (r *Request) AnswerObject() string {
	if r.Stream {
		return r.API.traits().chunk
	}
	return r.API.traits().object
}

// Chain is a prompt of token ids in blocks of one size.
type Chain struct {
	BlockSize int
	Blocks    []uint64 // content hashes of the full blocks, in order
}

// Kind is what a prompt's blocks are made of.
type Kind uint8

const (
	// None is a prompt without identity: it is missing, or in an unknown form.
	// Place it by load.
	None Kind = iota
	// Text is a prompt with canonical text.
	Text
	// Tokens is a prompt that the client sent as token ids.
	Tokens
)

// Request is what a request body contains. It does not change after parsing. Its
// strings and slices may point into the body, which must not change while the
// Request is in use. It has one field for each fact, hence their number.
type Request struct {
	// API is what the body was read as.
	API API
	// Model, LoRA (SGLang's lora_path) and Salt (cache_salt) are empty if the
	// body lacks them, or if they are no strings. Root covers them in any form.
	Model, LoRA, Salt string
	// Stream is whether the client asked for a stream of events.
	Stream bool
	// Choices is how many answers to one prompt are computed: the larger of n
	// and best_of. Default: 1.
	Choices int
	// PreviousResponse (previous_response_id) and Conversation (conversation,
	// or its id) name history that one server keeps. With either, the prompt is
	// not in the body, and Kind is None.
	PreviousResponse, Conversation string
	// Unstored is whether the client asks the server not to keep the response
	// (store). No later request can then name it.
	Unstored bool
	// CacheKey (prompt_cache_key), SessionID (session_id, or the id in
	// session_params) and UserSession identify the session, as the client sent them.
	// They are empty if absent. UserSession is the session in metadata.user_id of
	// Anthropic's Messages.
	CacheKey, SessionID, UserSession string
	// SessionHeld is whether session_params names a session, whose state the
	// engine keeps. SessionList is whether it is a list, for several prompts.
	SessionHeld, SessionList bool
	// MaxTokens is the limit of the answer's tokens; 0 is unknown.
	MaxTokens int64

	// Kind is what Blocks are made of.
	Kind Kind
	// Blocks are the content hashes of the prompt's full blocks, in order, of
	// Options.TextBlock bytes or Options.BlockSize tokens each. For a batch
	// they are those of the first prompt. They are valid until Done.
	Blocks []uint64
	// Prefixes are beginnings of a (first) prompt of text; none if Options.Sizes has none.
	Prefixes []cache.Prefix
	// Chains are the full blocks of a (first) prompt of token ids in each of Options.Sizes.
	// There are none if the body has media, or a member that selects a part of the cache. What
	// the engine caches is then unknown.
	Chains []Chain
	// Bytes is the length of the canonical text, in bytes, summed over a
	// batch. It is 0 if Kind is not Text.
	Bytes int64
	// Tokens is the exact number of prompt tokens, summed over a batch. It is
	// 0, which is unknown, if Kind is not Tokens.
	Tokens int64
	// Past is how far the (first) prompt goes on behind the last of Blocks, in
	// blocks.
	Past float32
	// First is the first prompt's part of Bytes or Tokens.
	First int64
	// SkipsCache is whether the engine computes the whole prompt, even what its
	// cache holds. vLLM and SGLang do for log probabilities of prompt tokens,
	// llama.cpp with cache_prompt false.
	SkipsCache bool
	// Truncated is whether the engine may cut the prompt (truncate_prompt_tokens).
	// Its count then differs from the text's.
	Truncated bool
	// MediaEnd is where the last part that is not text ends in the canonical
	// text, in bytes; 0 if there is none.
	MediaEnd int64
	// Head is the head of a conversation with tools and a system prompt.
	Head cache.Head
	// Media is the number of parts that are not text (images, audio, files).
	// Neither Bytes nor Tokens include their size.
	Media int
	// MediaTokens is an estimate of the tokens of these parts, from their size:
	// see medium.tokens. It is at most maxMediaTokens.
	MediaTokens int64
	// Root is the hash of what must be equal before chains can be compared.
	// This is the model, LoRA, salt, kind, block size, and members that change
	// the whole prompt (chat_template, documents, reasoning_effort and so on).
	Root uint64
	// NVExt is the raw value of the last nvext member that is not null; nil if
	// there is none.
	NVExt []byte
	// NullNVExt is whether there is an nvext member that is null.
	NullNVExt bool
	// Steers is whether a member sets an engine's rank, slot, priority or cache
	// retention.
	Steers bool
	// Echoes is whether the answer begins with the prompt (echo).
	Echoes bool
	// NamesPhases is whether a member names the prefill or the decode of the request on another
	// server.
	NamesPhases bool
	// ServerTools is whether a response may call tools of the engine, and so take several turns
	// there.
	ServerTools bool
	// Vertex is whether the body of an unknown API has Vertex AI's form, whose
	// `instances` and `parameters` are not read.
	Vertex bool

	size    int          // of the body
	brace   int          // where the body's object opens
	closing int          // where its closing bracket is
	options rawjson.Span // stream_options
	given   rawjson.Span // the prompt, if the client sent it as one text
	prompts int          // in the batch
	answers int          // to each prompt that are sent back: n
	ids     rawjson.Span // the prompt's token ids, if Kind is Tokens and it is one prompt
	block   int          // the block size in Root
	seed    uint64       // of Root
	// cacheVariant hashes members that change the whole prompt, or select a part of the
	// cache. templateVariant hashes members that change how text becomes tokens.
	cacheVariant, templateVariant uint64

	mixed       bool     // the ids are not the whole prompt: media or text stand beside them
	predictable bool     // prompt and answer together begin the next turn's prompt
	rest        hasher   // continues the prompt's text
	tail        []uint32 // the prompt's ids behind the last of Blocks

	memberCount int // of the body
	members     [keptMembers]rawjson.Member
}

// parse is the state of one Parse. Each API uses its own of the fields.
type parse struct {
	req  *Request
	opt  Options
	body []byte
	// main is the member that holds the prompt. In the text, system, tools and
	// functions may precede it. ids take its place; other is what it is
	// compared with, or may stand for it.
	main, system, tools, functions, ids, other rawjson.Span
	template                                   bool // the server keeps the prompt
	echo, resume                               bool
	logprobs, noTop, fromStart                 bool  // of log probabilities, see each API's prompt
	opaque                                     bool  // a part of the prompt has an unknown form
	maxTokens                                  int64 // the older max_tokens
	hash                                       hasher
	public                                     *xxh3.Hasher // memory for that of hash
}

// parses keeps the memory of parses for reuse: the methods of an API make it escape.
var parses = sync.Pool{New: func() any { return new(parse) }}

// ErrMembers means that a body has more than 4096 members.
var ErrMembers = errors.New("too many members")

// Parse reads a request body. Members that are absent or of a wrong type are
// unknown and never an error: the engine judges them. The error is
// rawjson.ErrMalformed, rawjson.ErrDepth or ErrMembers.
func Parse(a API, body []byte, o Options) (*Request, error) {
	r := &Request{API: a, Choices: 1, size: len(body), prompts: 1, answers: 1}
	p := parses.Get().(*parse)
	defer func() {
		*p = parse{public: p.public} // release the body
		parses.Put(p)
	}()
	*p = parse{req: r, opt: o.withDefaults(), body: body, public: p.public}
	if err := p.scan(); err != nil {
		return nil, err
	}
	if r.MaxTokens == 0 {
		r.MaxTokens = p.maxTokens
	}
	a.prompt(p)
	if p.opaque {
		r.Kind, r.Blocks, r.Bytes, r.Tokens = None, nil, 0, 0
	}
	// Media take places among the ids; embeddings and other ids precede them.
	mixed := p.opaque || r.Media > 0
	r.mixed = mixed || p.ids.HasContent(body)
	if mixed || r.cacheVariant != 0 || r.Kind != Tokens {
		r.Chains = nil
	}
	if r.Kind == Text {
		r.Blocks, r.Past, r.First = p.hash.blocks, p.hash.past(), p.hash.written()
		r.Prefixes = p.hash.prefixes
		p.hash.public, p.hash.prefixes = nil, nil
		r.rest = p.hash
	}
	generates := a.Work() == Generate
	r.Stream = r.Stream && generates
	r.predictable = r.Kind == Text && generates && r.Choices == 1 && r.prompts == 1 && !p.echo && !p.resume
	r.block, r.seed = p.opt.TextBlock, p.opt.Seed
	if r.Kind == Tokens {
		r.block = p.opt.BlockSize
	}
	r.Root = r.root()
	return r, nil
}

// scan walks the top-level members. It is the only pass over the whole body.
func (p *parse) scan() error {
	b := p.body
	c, ok := rawjson.Open(b)
	if !ok {
		return c.Err
	}
	p.req.brace = c.At - 1
	for c.Next() {
		key := c.Key()
		v := c.Value()
		if c.Err != nil {
			break
		}
		if p.req.note(c.KeyAt, v); p.req.memberCount > maxMembers {
			return ErrMembers
		}
		if string(key) != nameNVExt {
			p.field(key, v)
		} else if v.IsNull(b) {
			p.req.NullNVExt = true
		} else {
			p.req.NVExt = v.Of(b)
		}
	}
	if c.Err == nil && !c.Alone() {
		return rawjson.ErrMalformed
	}
	p.req.closing = c.At - 1
	return c.Err
}

func (r *Request) note(key int, v rawjson.Span) {
	if r.memberCount < keptMembers {
		r.members[r.memberCount] = rawjson.Member{Key: uint32(key), Start: uint32(v.Start), End: uint32(v.End)}
	}
	r.memberCount++
}

// Editor returns an Editor for the body that was parsed; nil for another one.
func (r *Request) Editor(body []byte) *rawjson.Editor {
	if len(body) != r.size {
		return nil
	}
	if r.memberCount > keptMembers || r.size > math.MaxUint32 {
		return rawjson.EditAt(body, r.brace, maxMembers)
	}
	return rawjson.NewEditor(body, r.closing, r.members[:r.memberCount])
}
