package engine

import (
	"strings"
	"time"

	"github.com/tidwall/gjson"
)

// MaxBody is how much of an answer is worth handing in, in bytes: pages of
// metrics are the longest.
const MaxBody = 4 << 20

// Get returns what a server answers to a GET request for a path: the status, and
// the body up to MaxBody. The status is 0 if there was no answer.
type Get func(path string) (status int, body []byte)

// Info is what a server tells of itself. What it does not tell is zero.
type Info struct {
	// Type is what it shows itself to be; Other if it answers and is none that
	// is known.
	Type    string
	Version string
	// KVTokens is the room in the KV cache of one data-parallel rank, in tokens:
	// in that of the smallest, if they differ.
	KVTokens int64
	// BlockSize is the number of tokens in one KV block.
	BlockSize int
	// DPSize is the number of data-parallel ranks behind the address.
	DPSize int
	// ContextTokens is the longest prompt and answer together, in tokens.
	ContextTokens int64
	// MaxRunning is the most requests that one rank runs at a time.
	MaxRunning int
	// NoPrefixCache says that the engine keeps no KV cache between requests.
	NoPrefixCache bool
	// Priority says that the engine orders requests by their priority, and
	// LowFirst that the lowest comes first; the highest does otherwise.
	Priority, LowFirst bool
	// PriorityEviction says that its KV cache keeps longest what came with the
	// highest priority.
	PriorityEviction bool
	// StrictThinking says that it heeds a limit of reasoning tokens.
	StrictThinking bool
	// Started is when its process started.
	Started time.Time
	// Life is something that is another one after each start. Empty if it tells
	// nothing of the kind.
	Life string
	// Unsure says that it did not answer all that it was asked, and is taken to
	// be Other for that.
	Unsure bool
}

// Or returns what is told, with what was told before in place of what is
// missing: a server that is busy may leave out a part. What another server, or
// another life of it, told before does not count.
func (t Info) Or(before Info) Info {
	if t.Type != before.Type || t.Life != before.Life && t.Life != "" && before.Life != "" {
		return t
	}
	if t.KVTokens == 0 && t.BlockSize == 0 { // what tells these tells those
		t.Priority, t.LowFirst, t.PriorityEviction, t.StrictThinking = before.Priority, before.LowFirst, before.PriorityEviction, before.StrictThinking
	}
	orDefault(&t.Version, before.Version)
	orDefault(&t.KVTokens, before.KVTokens)
	orDefault(&t.BlockSize, before.BlockSize)
	orDefault(&t.DPSize, before.DPSize)
	orDefault(&t.ContextTokens, before.ContextTokens)
	orDefault(&t.MaxRunning, before.MaxRunning)
	orDefault(&t.Started, before.Started)
	orDefault(&t.Life, before.Life)
	return t
}

func orDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// Ask finds out what a server is, and what it tells. The answer's Type is empty
// if nothing was learned.
func Ask(get Get) Info {
	s := newServer(get)
	kind := s.owner()
	for i := 0; kind == "" && i < len(shapes); i++ {
		if shapes[i].shows(s) {
			kind = shapes[i].kind
		}
	}
	if kind == "" {
		if status, _ := s.ask(pathModels); status == 200 {
			return Info{Type: Other, Unsure: s.gone}
		}
		return Info{}
	}
	if s.gone {
		return Info{}
	}
	return s.figures(kind)
}

// AskAs asks a server that is said to be of a type for what it tells. The
// answer's Type is what it shows itself to be, which may be another one; empty
// if it shows nothing.
func AskAs(kind string, get Get) Info {
	s := newServer(get)
	if shows := s.owner(); shows != "" {
		kind = shows
	}
	told := s.figures(kind)
	told.Type = s.owner()
	for i := 0; told.Type == "" && i < len(shapes); i++ {
		if shapes[i].kind == kind && shapes[i].shows(s) {
			told.Type = kind
		}
	}
	if s.gone {
		return Info{}
	}
	return told
}

// shapes are what servers are known by that do not say it in their list of
// models. A question that may have an effect comes last: asking TensorRT-LLM for
// its metrics takes them away from whoever else reads them.
var shapes = []struct {
	kind  string
	shows func(*server) bool
}{
	{SGLang, (*server).isSGLang},
	{TRTLLM, (*server).isTRTLLM},
	{LlamaCpp, (*server).isLlamaCpp},
	{Dynamo, (*server).isDynamo},
	{VLLM, (*server).isVLLM},
}

// figures asks for what servers of a type tell.
func (s *server) figures(kind string) Info {
	told := Info{Type: kind}
	switch kind {
	case VLLM:
		s.tellVLLM(&told)
	case SGLang:
		s.tellSGLang(&told)
	case TRTLLM:
		s.tellTRTLLM(&told)
	case LlamaCpp:
		s.tellLlamaCpp(&told)
	case Dynamo:
		s.tellDynamo(&told)
	}
	return told
}

// server is one server that is asked, each path once.
type server struct {
	get  Get
	had  map[string]answer
	gone bool // it did not answer once: it is not asked any more
}

type answer struct {
	status int
	body   []byte
}

func newServer(get Get) *server { return &server{get: get, had: make(map[string]answer)} }

// ask returns the answer to a GET request, with status 0 if there is none.
func (s *server) ask(path string) (int, []byte) {
	a, had := s.had[path]
	if !had && !s.gone {
		a.status, a.body = s.get(path)
		s.had[path] = a
		s.gone = a.status == 0
	}
	return a.status, a.body
}

// json returns the JSON object that a path answers with, an empty result if it
// answers with something else.
func (s *server) json(path string) gjson.Result {
	status, body := s.ask(path)
	if status != 200 {
		return gjson.Result{}
	}
	return readObject(body)
}

// Paths that servers of several types have.
const (
	pathModels     = "/v1/models"
	pathVersion    = "/version"
	pathServerInfo = "/server_info"
	pathMetrics    = "/metrics"
)

// owners are the types by what the list of models says of who owns them. Others
// write anything there.
var owners = map[string]string{"vllm": VLLM, "sglang": SGLang, "tensorrt_llm": TRTLLM, "llamacpp": LlamaCpp}

// owner returns the type that the list of models names, empty if it names none.
func (s *server) owner() string {
	return owners[s.listed()]
}

// listed returns whom the list of models names.
func (s *server) listed() string { return s.json(pathModels).Get("data.0.owned_by").Str }

// contextTokens returns the longest context that the list of models tells, 0 if
// it tells none.
func (s *server) contextTokens() int64 {
	var most int64
	s.json(pathModels).Get("data.#.max_model_len").ForEach(func(_, n gjson.Result) bool {
		most = max(most, count(n))
		return true
	})
	return most
}

// version returns what /version tells.
func (s *server) version() string { return readVersion(s.json(pathVersion)) }

func readObject(body []byte) gjson.Result {
	r := gjson.ParseBytes(body)
	if !r.IsObject() {
		return gjson.Result{}
	}
	return r
}

// maxVersion is how much of a version is kept, in bytes.
const maxVersion = 64

func readVersion(r gjson.Result) string { return cleaned(r.Get("version").Str) }

// cleaned returns a version as it can be shown.
func cleaned(v string) string {
	v = strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return -1
		}
		return r
	}, v[:min(len(v), 4*maxVersion)])
	return v[:min(len(v), maxVersion)]
}

// maxCount is the largest number that is believed.
const maxCount = 1 << 40

// count returns a positive whole number, 0 for anything else.
func count(r gjson.Result) int64 {
	if r.Type != gjson.Number || !(r.Num >= 1 && r.Num <= maxCount) {
		return 0
	}
	return int64(r.Num)
}

// Bounds of what is believed.
const (
	maxRanks     = 1024
	maxBlockSize = 4096
)

// within returns n, or 0 if it is more than most.
func within(n, most int64) int {
	if n < 0 || n > most {
		return 0
	}
	return int(n)
}
