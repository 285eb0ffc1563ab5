package engine

import (
	"cmp"
	"slices"
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

// Info is what a server reports about itself. What it does not report is zero. As JSON it is
// for the log.
type Info struct { // one member for each fact
	// Type is the engine type that the answers show; Other if the server answers
	// and is of no known type.
	Type    string `json:"type,omitzero"`
	Version string `json:"version,omitzero"`
	// KVTokens is the size of one data-parallel rank's KV cache, in tokens: of the
	// smallest one, if they differ.
	KVTokens int64 `json:"kv_tokens_per_rank,omitzero"`
	// BlockSize is the number of tokens in one KV block.
	BlockSize int `json:"block_size_tokens,omitzero"`
	// DPSize is the number of data-parallel ranks behind the address.
	DPSize int `json:"dp_size,omitzero"`
	// ContextTokens is the longest prompt and answer together, in tokens.
	ContextTokens int64 `json:"context_tokens,omitzero"`
	// MaxRunning is the largest number of requests that one rank runs at a time.
	MaxRunning int `json:"max_running_requests_per_rank,omitzero"`
	// StepTokens is how many prompt tokens one rank computes in a step, at most.
	StepTokens int64 `json:"step_tokens_per_rank,omitzero"`
	// NoPrefixCache says that the engine keeps no KV cache between requests.
	NoPrefixCache bool `json:"-"`
	// Priority says that the engine orders requests by priority.
	Priority bool `json:"priority_scheduling,omitzero"`
	// LowFirst says that the lowest priority comes first instead of the highest.
	LowFirst bool `json:"-"`
	// PriorityEviction says that the KV cache evicts low priorities first.
	PriorityEviction bool `json:"priority_eviction,omitzero"`
	// StrictThinking says that the engine heeds a limit of reasoning tokens.
	StrictThinking bool `json:"strict_thinking,omitzero"`
	// NoSessions says that the engine holds no sessions, or only such that the router
	// cannot use.
	NoSessions bool `json:"-"`
	// Role is which part of requests the server is started for; empty if it does not say.
	Role Role `json:"role,omitzero"`
	// TransferPort is where decode engines ask a prefill engine for a transfer.
	TransferPort int `json:"transfer_port,omitzero"`
	// MooncakeIDs are the names of the ranks in Mooncake, one in a line.
	MooncakeIDs string `json:"-"`
	// KVEvents says where it publishes its KV events.
	KVEvents KVEvents `json:"-"`
	// Asleep says that the engine has given its memory away, and answers no inference until it is woken.
	Asleep bool `json:"asleep,omitzero"`
	// Discarded says that it has given its weights away, too, and must load them again.
	Discarded bool `json:"discarded_weights,omitzero"`
	// Started is when the server's process started.
	Started time.Time `json:"started,omitzero"`
	// BootID changes with each start of the server. It is empty if the server reports
	// nothing of that kind.
	BootID string `json:"-"`
	// Unsure says that the type is Other because some answers were missing.
	Unsure bool `json:"-"`
}

// OmitsZeroCached returns whether the engine's answers omit a count of 0 cached tokens.
func (t Info) OmitsZeroCached() bool { return kindOf(t.Type).omitsZeroCached }

// Ask finds out the engine type of a server, and what it reports. The result's
// Type is empty if the answers show nothing.
func Ask(get Get) Info {
	s := &server{get: get, had: make(map[string]answer)}
	k := s.kind(kinds)
	if k == nil {
		if status, _ := s.ask(pathModels); status == 200 {
			return Info{Type: Other, Unsure: s.gone}
		}
	}
	if k == nil || s.gone {
		return Info{}
	}
	return s.info(k)
}

// AskAs asks a server of an expected type what it reports. The result's Type is
// what the answers show, which may be another type; empty if they show nothing or one fails.
func AskAs(name string, get Get) Info {
	s := &server{get: get, had: make(map[string]answer), strict: true}
	k := cmp.Or(s.owner(), kindOf(name))
	info := s.info(k)
	if s.kind([]*kind{k}) == nil {
		info.Type = ""
	}
	if s.gone {
		return Info{}
	}
	return info
}

// kind returns the type that the server shows, of these types or by its list of
// models. It returns nil if the server shows none.
func (s *server) kind(of []*kind) *kind {
	if owner := s.owner(); owner != nil {
		return owner
	}
	if i := slices.IndexFunc(of, func(k *kind) bool { return k.shows != nil && k.shows(s) }); i >= 0 {
		return of[i]
	}
	return nil
}

// info reads what servers of a type report.
func (s *server) info(k *kind) Info {
	info := Info{Type: k.name}
	if k.read != nil {
		k.read(s, &info)
	}
	return info
}

// server asks one server for each path once.
type server struct {
	get  Get
	had  map[string]answer
	gone bool // it failed to answer: do not ask again
	// strict: a status from 500 is a failure, too, for it had an answer before.
	strict bool
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
		s.gone = a.status == 0 || s.strict && a.status >= 500
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

// owner returns the type that the list of models names, nil if it names none. Other
// servers write anything there.
func (s *server) owner() *kind {
	by := s.ownedBy()
	if i := slices.IndexFunc(kinds, func(k *kind) bool { return k.owner != "" && k.owner == by }); i >= 0 {
		return kinds[i]
	}
	return nil
}

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
