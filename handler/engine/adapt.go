package engine

import (
	"slices"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Request is what is known of a request, and of the worker that it goes to,
// before it is put into the words of that worker's engine.
type Request struct {
	// API is the name of the client's API, else what PostTo has of the path.
	API string
	// Salt keeps the request's cache and sessions apart, empty if nothing does:
	// that of Ext, or the one that the body has beside nvext.
	Salt string
	// Sent are the client's headers, in the canonical form of net/http.
	Sent map[string][]string
	// Body changes the request's body. It is nil if that was not read.
	Body *api.Editor
	// Ext is what the client says to the router, less what is not granted.
	Ext *nvext.Ext
	// Grants are what Ext was restricted to.
	Grants nvext.Grants
	// Rank is the data-parallel rank that was chosen, of so many Ranks.
	Rank  uint32
	Ranks int
	// GiveTokens is whether the ids of token_data take the place of the body's
	// prompt.
	GiveTokens bool
}

// Settings are what an operator says of an engine that it may not tell.
type Settings struct {
	// Priority is whether the engine orders requests by their priority.
	// Engines that do not may refuse those that have one.
	Priority Switch
	// ThinkingBudget is whether the engine takes a limit of reasoning tokens.
	ThinkingBudget Switch
	// CacheSalt is whether the engine keeps the caches of requests with
	// different salts apart, in each API in which it is given one.
	CacheSalt Switch
	// DynamoInstance is the instance that a worker's pins mean to the Dynamo
	// behind it, 0 if they mean nothing there.
	DynamoInstance uint64
}

// Switch is a setting that may be left to what an engine tells.
type Switch uint8

// The switches.
const (
	Auto Switch = iota
	On
	Off
)

// ParseSwitch returns the switch of a word: `on`, `off`, and `auto` or nothing.
// It is not ok for anything else.
func ParseSwitch(word string) (s Switch, ok bool) {
	switch word {
	case "", "auto":
		return Auto, true
	case "on":
		return On, true
	case "off":
		return Off, true
	}
	return Auto, false
}

// or returns whether it is on, where told is what counts for Auto.
func (s Switch) or(told bool) bool { return s == On || s == Auto && told }

// Header is a request header. An engine gets this value and no other.
type Header struct {
	// Name is in the canonical form of net/http.
	Name  string
	Value string
	// Default leaves the client's own value, if it sends one.
	Default bool
}

// Adapted is what an engine gets in place of what the client sent.
type Adapted struct {
	// Headers are set. The client's own that name a worker or a rank are taken
	// out by the caller.
	Headers []Header
	// Lacks are the fields of nvext that this engine, or this API of it, has
	// nothing for. They are dropped.
	Lacks Fields
	// Dropped are the kinds of trust that members of the engine's own would have
	// needed, which were cut out.
	Dropped nvext.Grants
}

// Fields are fields of nvext that are for the engine.
type Fields uint16

// The fields.
const (
	GreedSampling Fields = 1 << iota
	UseRawPrompt
	TokenData
	MaxThinkingTokens
	SessionParams
	CacheControl
	CacheSalt
	Priority
	MetadataUpload
	fieldCount = iota
)

var fieldNames = [fieldCount]string{
	"greed_sampling", "use_raw_prompt", "token_data", "max_thinking_tokens", "session_params", "cache_control", "cache_salt",
	"agent_hints.priority", "metadata_upload",
}

// Names calls yield with the name of each field in f. It is a sequence: range
// over it. The names are good as label values.
func (f Fields) Names(yield func(string) bool) {
	for n, name := range fieldNames {
		if f>>n&1 == 1 && !yield(name) {
			return
		}
	}
}

// said returns the fields that a client's nvext has.
func said(e *nvext.Ext) (f Fields) {
	for n, there := range [fieldCount]bool{
		e.GreedSampling.Value, e.UseRawPrompt.Value, e.TokenCount > 0, e.MaxThinkingTokens.Set, e.SessionParams.Span.End > 0,
		e.CacheTTL.Set, e.Salt("") != "", e.AgentHints.Priority.Set, e.MetadataUpload != "",
	} {
		if there {
			f |= 1 << n
		}
	}
	return f
}

// Speaks tells whether anything that a client says in headers or in its body is
// for the engine.
func Speaks(e *nvext.Ext) bool {
	return said(e) != 0 || e.Session() != "" || e.BackendInstanceID.Set || e.DecodeWorkerID.Set
}

// Adapt puts a request into the engine's words. The changes of the body are in
// r.Body.
func (e *Engine) Adapt(r *Request) Adapted {
	f := fit{Request: r, Engine: e, said: said(r.Ext)}
	if e.Type == Dynamo {
		f.toDynamo()
		return f.Adapted
	}
	if e.TakesRank() {
		f.rankByHeader()
	}
	if e.Type == SGLang {
		f.sglangRank()
		f.sglangSessions()
	}
	if f.plain() {
		f.greedy()
		f.giveTokens()
		switch e.Type {
		case VLLM:
			f.toVLLM()
		case SGLang:
			f.toSGLang()
		case TRTLLM:
			f.toTRTLLM()
		case LlamaCpp:
			f.toLlamaCpp()
		default:
			f.toOther()
		}
	}
	f.guard()
	f.Lacks |= f.said // what nobody took is dropped
	return f.Adapted
}

// fit is one request being put into the words of an engine.
type fit struct {
	*Request
	*Engine
	Adapted
	said      Fields        // and not dealt with yet
	samplings []*api.Editor // see sampling
	scope     string        // of the salt, see sglangSessions
}

// The names of APIs.
const (
	apiChat        = "chat"
	apiCompletions = "completions"
	apiResponses   = "responses"
	apiMessages    = "messages"
	apiGenerate    = "generate" // SGLang's
	apiTokens      = "tokens"   // vLLM's /inference/v1/generate
)

// on tells whether the request is of one of the APIs.
func (f *fit) on(apis ...string) bool { return slices.Contains(apis, f.API) }

// plain takes nvext out for an engine that does not know it. It returns false if
// there is no more to be done. Null is the same as nothing to all but
// TensorRT-LLM, which refuses members that it does not know.
func (f *fit) plain() bool {
	if f.Body == nil {
		return false
	}
	if f.Type == TRTLLM {
		f.Body.Cut("nvext")
	} else {
		f.Body.CutNVExt()
	}
	return f.said != 0
}

// takes tells whether a field is there to be given to the engine, which takes it
// if ok.
func (f *fit) takes(field Fields, ok bool) bool {
	if f.said&field == 0 || !ok {
		return false
	}
	f.said &^= field
	return true
}

// header gives the engine a header.
func (f *fit) header(name, value string) {
	f.Headers = append(f.Headers, Header{Name: name, Value: value})
}

// HeaderRank is the header by which vLLM is told the rank, in the canonical form
// of net/http. SGLang reads it, too, in newer versions.
const HeaderRank = "X-Data-Parallel-Rank"

// rankByHeader tells the rank where there are several.
func (f *fit) rankByHeader() {
	if f.Ranks > 1 {
		f.header(HeaderRank, strconv.FormatUint(uint64(f.Rank), 10))
	}
}

// greedy asks for the likeliest token each time: temperature 0.
func (f *fit) greedy() {
	zero := []byte{'0'}
	switch {
	case f.takes(GreedSampling, f.on(apiChat, apiCompletions, apiResponses, apiMessages)):
		f.Body.Set("temperature", zero)
	case f.said&GreedSampling == 0:
	case f.on(apiGenerate, apiTokens):
		all, ok := f.sampling()
		for _, in := range all {
			in.Set("temperature", zero)
		}
		f.takes(GreedSampling, ok)
	}
}

// sampling returns the objects in sampling_params: one, or in a list one for
// each prompt.
func (f *fit) sampling() (all []*api.Editor, ok bool) {
	if f.samplings == nil {
		if in, ok := f.Body.Object("sampling_params"); ok {
			f.samplings = []*api.Editor{in}
		} else {
			f.samplings, _ = f.Body.Elements("sampling_params")
		}
	}
	return f.samplings, f.samplings != nil
}

// part returns a part of the nvext at a place of the body.
func (f *fit) part(at, s rawjson.Span) []byte {
	return f.Body.Text(at.Within(s))
}

// integer sets a member of the body to a number, or replaces the client's.
func (f *fit) integer(member string, n int64) { f.Body.Set(member, strconv.AppendInt(nil, n, 10)) }

// text is integer for a text.
func (f *fit) text(member, s string) { f.Body.Set(member, quoted(s)) }

// short returns a text as it is if it is no longer than most bytes, else a digest
// of it, which has 71.
func short(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return digest([]byte(s))
}

// digest returns a digest of a text.
func digest(s []byte) string { return "sha256:" + nvext.Digest(s) }
