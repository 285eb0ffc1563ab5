package engine

import (
	"slices"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Request is a request on its way to a worker, before Adapt.
type Request struct {
	// API is the name of the client's API, else the result of PostTo.
	API string
	// Salt isolates the request's cache and sessions: the salt of Ext, or of the
	// body outside nvext. It is empty for a request without isolation.
	Salt string
	// Session is the engine's id of the session that the request continues, see
	// SessionID. It replaces the client's own id. It is empty if the engine holds no
	// session of the request.
	Session string
	// Sent are the client's headers, in the canonical form of net/http.
	Sent map[string][]string
	// Body edits the request's body. It is nil for a body that was not read.
	Body *rawjson.Editor
	// Ext is what the client says to the router, without what is not granted.
	Ext *nvext.Ext
	// Grants are the grants by which Ext was restricted.
	Grants nvext.Grants
	// Rank is the selected data-parallel rank. Ranks is the number of ranks.
	Rank  uint32
	Ranks int
	// GiveTokens replaces the body's prompt by the ids of token_data.
	GiveTokens bool
	// Phase is the part of the request that the engine serves. nil: the whole request.
	Phase *Phase
}

// Settings are what an operator says of an engine that may not report it.
type Settings struct {
	// Priority says whether the engine orders requests by priority. Other engines
	// may refuse requests that have one.
	Priority Switch
	// ThinkingBudget says whether the engine accepts a limit of reasoning tokens.
	ThinkingBudget Switch
	// CacheSalt says whether the engine isolates the caches of requests with
	// different salts, in each API in which it gets one.
	CacheSalt Switch
	// Sessions says whether the engine holds sessions. On means in each API in which
	// it gets a session's id; Auto only in those in which its type is known to heed it.
	Sessions Switch
	// Role is which part of requests the worker serves. Empty: the role that the engine
	// reports.
	Role Role
	// MooncakePort is that of the bootstrap server of a vLLM for prefills; 0 without Mooncake.
	MooncakePort int
	// DynamoInstance is the instance of the Dynamo behind the worker that a pin to
	// the worker means. 0 means no instance.
	DynamoInstance uint64
}

// Switch is a setting that may depend on what an engine reports: On, Off, and Auto
// or empty.
type Switch string

// The switches.
const (
	Auto Switch = "auto"
	On   Switch = "on"
	Off  Switch = "off"
)

// Known returns whether there is such a switch.
func (s Switch) Known() bool { return s == "" || s == Auto || s == On || s == Off }

// or returns whether the switch is on. Auto follows what the engine reported.
func (s Switch) or(reported bool) bool { return s == On || s != Off && reported }

// Header is a request header. The engine gets this value instead of the client's.
type Header struct {
	// Name is in the canonical form of net/http.
	Name  string
	Value string
	// Default keeps the client's value, if there is one.
	Default bool
}

// Adapted is what an engine gets instead of what the client sent.
type Adapted struct {
	// Headers are to be set. The caller removes the client's headers that name a
	// worker or a rank.
	Headers []Header
	// Unsupported are the fields of nvext that this engine cannot use in this API. Adapt
	// has dropped them.
	Unsupported Fields
	// Dropped are the grants that the client lacks for members of the engine's own.
	// Adapt has removed those members.
	Dropped nvext.Grants
}

// Fields are fields of nvext for the engine.
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
	"greed_sampling", "use_raw_prompt", "token_data", "max_thinking_tokens", "session_params", "cache_control",
	"cache_salt", "agent_hints.priority", "metadata_upload",
}

// Names is an iterator over the names of the fields in f. They are fit for label
// values.
func (f Fields) Names(yield func(string) bool) {
	for n, name := range fieldNames {
		if f>>n&1 == 1 && !yield(name) {
			return
		}
	}
}

// requested returns the fields that a client's nvext has.
func requested(e *nvext.Ext) (f Fields) {
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

// Speaks returns whether a client says anything for the engine, in headers or in
// its body.
func Speaks(e *nvext.Ext) bool {
	return requested(e) != 0 || e.Session() != "" || e.BackendInstanceID.Set || e.DecodeWorkerID.Set
}

// Adapt puts a request into the engine's own members and headers. It edits r.Body.
func (e *Engine) Adapt(r *Request) Adapted {
	f := adapter{Request: r, Engine: e, kind: kindOf(e.Type), requested: requested(r.Ext)}
	if f.Ranks > 1 && e.TakesRankIn(f.API) {
		f.header(HeaderRank, strconv.FormatUint(uint64(f.Rank), 10))
	}
	if f.always != nil {
		f.always(&f)
	}
	if f.readsNVExt {
		return f.Adapted
	}
	if f.Body != nil {
		f.Body.CutGiven(nameNVExt)
		f.fields()
		f.phase() // first: what it sets, guard leaves
		f.guard()
	}
	f.Unsupported |= f.requested
	return f.Adapted
}

// fields gives the engine the fields of nvext.
func (f *adapter) fields() {
	if f.requested == 0 {
		return
	}
	f.greedy()
	f.giveTokens()
	f.cacheSalt()
	if f.adapt != nil {
		f.adapt(f)
	}
}

const nameNVExt = "nvext"

// HeaderRank is vLLM's header for the rank, in the canonical form of net/http.
// Newer versions of SGLang read it, too.
const HeaderRank = "X-Data-Parallel-Rank"

// adapter is one request for one engine.
type adapter struct {
	*Request
	*Engine
	*kind
	Adapted
	requested Fields // the fields that the engine did not get yet
	scope     string // of the salt, see sglangSessions
}

func (f *adapter) on(apis ...string) bool { return slices.Contains(apis, f.API) }

// takes returns whether the caller must give a field to the engine: the client
// said it, and the engine accepts it (ok). The field is then dealt with.
func (f *adapter) takes(field Fields, ok bool) bool {
	if f.requested&field == 0 || !ok {
		return false
	}
	f.requested &^= field
	return true
}

func (f *adapter) header(name, value string) {
	f.Headers = append(f.Headers, Header{Name: name, Value: value})
}

// greedy asks for the likeliest token each time: temperature 0.
func (f *adapter) greedy() {
	in, ok := f.Body, f.on(api.NameChat, api.NameCompletions, api.NameResponses, api.NameMessages)
	if f.requested&GreedSampling != 0 && f.on(api.NameGenerate, api.NameTokens) {
		in, ok = f.Body.Object(nameSampling)
	}
	if f.takes(GreedSampling, ok) {
		in.Set("temperature", []byte{'0'})
	}
}

// nameSampling has the sampling parameters of SGLang's /generate and vLLM's
// /inference/v1/generate. Lists of them, for several prompts, stay as they are.
const nameSampling = "sampling_params"

const nameBudget = "thinking_token_budget" // vLLM's and TensorRT-LLM's

func (f *adapter) integer(member string, n int64) { f.Body.Set(member, strconv.AppendInt(nil, n, 10)) }

func (f *adapter) text(member, s string) { f.Body.Set(member, quoted(s)) }

func quoted(s string) []byte { return rawjson.AppendString(nil, s) }

// short returns a text of at most that many bytes unchanged, else a digest of it,
// which has 71.
func short(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return digest([]byte(s))
}

func digest(s []byte) string { return "sha256:" + nvext.Digest(s) }
