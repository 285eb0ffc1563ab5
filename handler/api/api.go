package api

import (
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Work is what an engine does for a request.
type Work uint8

const (
	// Count means that the engine counts the prompt's tokens and computes
	// nothing. The request has no chain (Kind None): place it by load.
	Count Work = iota
	// Prefill means that the engine stops after the prompt: embeddings, scores,
	// classes. Expect no output blocks; Request.Stream is false.
	Prefill
	// Generate means that the engine generates tokens.
	Generate
)

// Names of APIs that engines treat differently.
const (
	NameChat        = "chat"
	NameCompletions = "completions"
	NameCompletion  = "completion" // llama.cpp's
	NameResponses   = "responses"
	NameMessages    = "messages"
	NameGenerate    = "generate" // SGLang's
	NameTokens      = "tokens"   // vLLM's /inference/v1/generate
	NameEmbeddings  = "embeddings"
	NameRerank      = "rerank"
	NameScore       = "score"
	NameClassify    = "classify"
	NamePooling     = "pooling"
)

// API is one of the clients' APIs, as For returns it. Only this package
// implements it.
type API interface {
	// Name is short, constant and fit for a metric label: "chat",
	// "completions".
	Name() string
	// Work is what an engine does for a request.
	Work() Work

	// traits are the other constant properties.
	traits() traits
	// field reads a top-level member that the APIs do not share. If a name
	// repeats, the last member counts, as in the engines.
	field(p *parse, key []byte, v rawjson.Span)
	// prompt reads the prompt from the members that field has found.
	prompt(p *parse)
	// begin writes what stands between a prompt and the answer's text.
	begin(a *Answer)
	// event reads the object or array at b[i]: an event's data, or a plain
	// answer. It returns false if it is malformed.
	event(a *Answer, b []byte, i int) bool
}

type traits struct {
	shape shape // of errors
	// asksUsage: a stream reports usage only if stream_options asks for it.
	asksUsage bool
	// continues: the answer's text, as one more of `messages`, begins the next
	// turn.
	continues bool
	// joins: a stream without text can go on elsewhere after its first events.
	// joinsText: a stream with text can go on elsewhere.
	joins, joinsText bool
	// object and chunk are the member object of plain answers and of events. They
	// are empty for an API whose answers carry no nvext.
	object, chunk string
}

// base is what most APIs share. Each API embeds it.
type base struct{}

func (base) Work() Work                           { return Generate }
func (base) traits() traits                       { return traits{} }
func (base) prompt(*parse)                        {}
func (base) begin(*Answer)                        {}
func (base) event(*Answer, []byte, int) (ok bool) { return true }

// where is what may stand before an API's suffix in a path.
type where uint8

const (
	anywhere where = iota
	// versioned allows nothing, or a path that ends in a version (/v1), in
	// /openai or in /deployments/{name} (Azure). Other paths may end in the same
	// suffix: /v1/threads/{id}/messages is no inference.
	versioned
	// alone allows nothing: /api/generate is Ollama's, with another form.
	alone
)

// apis lists all APIs. If two suffixes fit, the first entry wins.
var apis = [...]struct {
	suffix string
	where  where
	api    API
}{
	{"/chat/completions", anywhere, chat{}},
	{"/completions", anywhere, completions{}},
	{"/completion", alone, completion{}},
	{"/responses", versioned, responses{}},
	{"/messages", versioned, messages{}},
	{"/messages/count_tokens", versioned, countTokens{}},
	{"/inference/v1/generate", anywhere, tokensIn{}},
	{"/generate", alone, generate{}},
	{"/embeddings", versioned, pooled{name: NameEmbeddings}},
	{"/rerank", versioned, scored{pooled{name: NameRerank}}},
	{"/score", versioned, scored{pooled{name: NameScore}}},
	{"/classify", versioned, pooled{name: NameClassify}},
	{"/pooling", versioned, pooled{name: NamePooling}},
}

// For returns the API of a request path, or nil if a POST to the path is no
// inference request. The usual prefixes may precede the API's own path (/v1,
// /openai/v1, nothing). The caller checks the method.
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

// Unplanned reads the bodies of requests that For does not know: the model and
// routing members, but no prompt. Its errors have OpenAI's shape.
var Unplanned API = unplanned{}

type unplanned struct{ base }

func (unplanned) Name() string { return "" }
func (unplanned) Work() Work   { return Count }

// field recognizes Vertex AI's form, as in SGLang's /vertex_generate.
func (unplanned) field(p *parse, key []byte, _ rawjson.Span) {
	p.req.Vertex = p.req.Vertex || string(key) == "instances"
}
