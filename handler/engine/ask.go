package engine

import (
	"strings"
	"time"

	"github.com/tidwall/gjson"
)

// MaxBody is the longest answer that a Get needs to return, in bytes. Pages of
// metrics are the longest.
const MaxBody = 4 << 20

// Get returns a server's answer to a GET request for a path: the status, and the
// body up to MaxBody. The status is 0 if there is no answer.
type Get func(path string) (status int, body []byte)

// Info is what a server reports about itself. What it does not report is zero.
type Info struct { // one member for each fact
	// Type is the engine type that the answers show; Other if the server answers
	// and is of no known type.
	Type    string
	Version string
	// KVTokens is the size of one data-parallel rank's KV cache, in tokens: of the
	// smallest one, if they differ.
	KVTokens int64
	// BlockSize is the number of tokens in one KV block.
	BlockSize int
	// DPSize is the number of data-parallel ranks behind the address.
	DPSize int
	// ContextTokens is the longest prompt and answer together, in tokens.
	ContextTokens int64
	// MaxRunning is the largest number of requests that one rank runs at a time.
	MaxRunning int
	// NoPrefixCache says that the engine keeps no KV cache between requests.
	NoPrefixCache bool
	// Priority says that the engine orders requests by priority. LowFirst says
	// that the lowest comes first instead of the highest.
	Priority, LowFirst bool
	// PriorityEviction says that the KV cache evicts low priorities first.
	PriorityEviction bool
	// StrictThinking says that the engine heeds a limit of reasoning tokens.
	StrictThinking bool
	// Started is when the server's process started.
	Started time.Time
	// Life changes with each start of the server. It is empty if the server reports
	// nothing of that kind.
	Life string
	// Unsure says that the type is Other because some answers were missing.
	Unsure bool
}

// Or fills gaps in t with what the same server reported before: a busy server may
// omit a part. It uses nothing from another server or another life.
func (t Info) Or(before Info) Info {
	if t.Type != before.Type || t.Life != before.Life && t.Life != "" && before.Life != "" {
		return t
	}
	if t.KVTokens == 0 && t.BlockSize == 0 { // the same page reports all of these
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

// Ask finds out the engine type of a server, and what it reports. The result's
// Type is empty if the answers show nothing.
func Ask(get Get) Info {
	s := &server{get: get, had: make(map[string]answer)}
	kind := s.kind("")
	if kind == "" {
		if status, _ := s.ask(pathModels); status == 200 {
			return Info{Type: Other, Unsure: s.gone}
		}
	}
	if kind == "" || s.gone {
		return Info{}
	}
	return s.info(kind)
}

// AskAs asks a server of an expected type what it reports. The result's Type is
// what the answers show, which may be another type; empty if they show nothing.
func AskAs(kind string, get Get) Info {
	s := &server{get: get, had: make(map[string]answer)}
	if owner := s.owner(); owner != "" {
		kind = owner
	}
	info := s.info(kind)
	info.Type = s.kind(kind)
	if s.gone {
		return Info{}
	}
	return info
}

// types are how a server shows its type, if its list of models does not, and how
// to read its Info. A question with an effect comes late: reading TensorRT-LLM's
// metrics takes them from their other readers.
var types = []struct {
	name  string
	shows func(*server) bool
	read  func(*server, *Info)
}{
	{SGLang, (*server).isSGLang, (*server).readSGLang},
	{TRTLLM, (*server).isTRTLLM, (*server).readTRTLLM},
	{LlamaCpp, (*server).isLlamaCpp, (*server).readLlamaCpp},
	{Dynamo, (*server).isDynamo, (*server).readDynamo},
	{VLLM, (*server).isVLLM, (*server).readVLLM},
}

// kind returns the type that the server shows, empty if it shows none. It tests
// for one type only, if that is not empty.
func (s *server) kind(only string) string {
	if owner := s.owner(); owner != "" {
		return owner
	}
	for _, t := range types {
		if (only == "" || only == t.name) && t.shows(s) {
			return t.name
		}
	}
	return ""
}

// info reads what servers of a type report.
func (s *server) info(kind string) Info {
	info := Info{Type: kind}
	for _, t := range types {
		if t.name == kind {
			t.read(s, &info)
		}
	}
	return info
}

// server asks one server for each path once.
type server struct {
	get  Get
	had  map[string]answer
	gone bool // it failed to answer: do not ask again
}

type answer struct {
	status int
	body   []byte
}

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

// json returns the JSON object at a path, an empty result for any other answer.
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

// owners are the types by the owner in the list of models. Other servers write
// anything there.
var owners = map[string]string{"vllm": VLLM, "sglang": SGLang, "tensorrt_llm": TRTLLM, "llamacpp": LlamaCpp}

// owner returns the type that the list of models names, empty if it names none.
func (s *server) owner() string { return owners[s.ownedBy()] }

// ownedBy returns the owner in the list of models.
func (s *server) ownedBy() string { return s.json(pathModels).Get("data.0.owned_by").Str }

// contextTokens returns the longest context in the list of models, 0 without one.
func (s *server) contextTokens() int64 {
	var most int64
	s.json(pathModels).Get("data.#.max_model_len").ForEach(func(_, n gjson.Result) bool {
		most = max(most, count(n))
		return true
	})
	return most
}

func (s *server) version() string { return readVersion(s.json(pathVersion)) }

func readObject(body []byte) gjson.Result {
	r := gjson.ParseBytes(body)
	if !r.IsObject() {
		return gjson.Result{}
	}
	return r
}

// maxVersion is the longest version that is kept, in bytes.
const maxVersion = 64

func readVersion(r gjson.Result) string { return cleaned(r.Get("version").Str) }

// cleaned returns the printable characters of a version.
func cleaned(v string) string {
	v = strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return -1
		}
		return r
	}, v[:min(len(v), 4*maxVersion)])
	return v[:min(len(v), maxVersion)]
}

// maxCount is the largest credible number.
const maxCount = 1 << 40

// count returns a positive whole number, 0 for anything else.
func count(r gjson.Result) int64 {
	if r.Type != gjson.Number || !(r.Num >= 1 && r.Num <= maxCount) {
		return 0
	}
	return int64(r.Num)
}

// Bounds of what is credible.
const (
	maxRanks     = 1024
	maxBlockSize = 4096
)

// within returns n, or 0 if it is negative or more than most.
func within(n, most int64) int {
	if n < 0 || n > most {
		return 0
	}
	return int(n)
}
