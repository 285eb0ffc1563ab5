// Package journal keeps what a router did as records, so that its next run knows it. They tell of
// prompts and their answers by worker, of the bindings of sessions, and of what was learned. Text
// never leaves the process; a record has keyed hashes of it.
//
// A [Journal] gathers records, in memory, from requests that do not wait for it. A [Log] has them on
// disk, and [Read] reads them back. A [Stream] has those of several routers. A [Follower] applies those
// of the others. The package does not decide where a request goes.
//
// # Format
//
// A log is entries, and each is a unit that is there whole or not at all:
//
//	4 bytes   length of the following, without the sum
//	1 byte    version of the format: a reader skips entries of others
//	varint    the time, Unix milliseconds
//	varint    prompts since the last KindBegin
//	          records: kind (1 byte), length (varint), fields
//	8 bytes   XXH3 of all but the length
//
// A reader skips kinds that it does not know, and the fields behind those that it knows. So newer
// versions may add both. Numbers are varints, or have the fixed length that [Encoder] gives them.
// KindBegin and KindState, which are rare, are JSON.
//
// Records name workers and prompts by their numbers, which count from a [KindBegin] record. A
// prompt is an earlier one, the number of blocks that it shares with that, and its further blocks,
// of 8 bytes. If an entry is lost, prompts that build on its prompts are unknown. A request that has
// not ended goes on over a KindBegin of the same run.
package journal

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/texts"
)

// version is that of the format. It must also grow if the hashes of sessions or of prompts change.
const version = 2

// Kind is the kind of a record.
type Kind byte

// The kinds of records. The numbers are part of the format.
const (
	// KindBegin begins a run of a router, or a file. Numbers of workers and prompts begin anew.
	KindBegin Kind = iota + 1
	// KindWorker gives a worker a number.
	KindWorker
	// KindBooked is a request that was sent to a worker.
	KindBooked
	// KindEnded is the end of such a request.
	KindEnded
	// KindBound binds a session, KindUsed restarts its time to live, and KindUnbound ends it.
	KindBound
	KindUsed
	KindUnbound
	// KindResponse is a response that an engine keeps.
	KindResponse
	// KindLost says that a worker has lost its KV cache.
	KindLost
	// KindState is what was learned, and what is known of the workers.
	KindState
	// KindAnswered says that the prefill of a request is over. Logs on disk do without.
	KindAnswered
	// KindDrained begins or ends the drain of a worker by the admin API.
	KindDrained
	// KindModels is a worker's list of its models, as JSON.
	KindModels
	// KindPaid says who pays for a request. Logs on disk do without.
	KindPaid
	// KindQuota is a change of what a tenant has used, and KindTenant how its account stands.
	KindQuota
	KindTenant
)

// Head is what must be known before all else.
type Head struct {
	Secret  affinity.Secret  `json:"secret"` // of the hashes of sessions
	Seed    uint64           `json:"seed"`   // of the hashes of prompts
	Version affinity.Version `json:"version"`
	// TextBlock is the bytes in a block of prompt text, and BlockSize the tokens in a KV block.
	TextBlock int `json:"text_block"`
	BlockSize int `json:"block_size"`
	// Run is a random number of the run, of the encoder. Requests have numbers of their own in each.
	Run uint64 `json:"run"`
	// Name is the router's, and Keys identifies its secret and seed.
	Name string `json:"name,omitempty"`
	Keys uint64 `json:"keys,omitempty"`
}

// State is what was learned, and what is known of the workers. Targets name workers by the ids in
// Workers.
type State struct {
	Workers []Worker            `json:"workers"`
	Learned kvscore.Learned     `json:"learned"`
	Ratios  []texts.ModelRatios `json:"ratios"`
}

// Worker is a worker by its address: its id may change.
type Worker struct {
	Dial   string    `json:"dial"`
	ID     uint64    `json:"id"`
	BootID string    `json:"life,omitempty"` // what the engine reported of its start, empty if nothing
	Seen   time.Time `json:"seen"`           // when it was last an upstream
}

// Model is a model in a worker's list.
type Model struct {
	ID      string `json:"id"`
	Adapter bool   `json:"adapter,omitempty"` // a LoRA adapter of another model
}

// Target is a rank of the worker with that number.
type Target struct {
	Worker int
	Rank   uint32
}

// Response is a response that an engine keeps.
type Response struct {
	Hash    uint64 // of its id
	Session affinity.Identity
}

// Booking is a request that was sent to a target.
type Booking struct {
	At       time.Time
	Target   Target
	Prompt   *Prompt // nil if it is unknown
	Tokens   int64   // of the prompt, about
	Expected int64   // tokens of the answer; 0 is unknown
	// Matched is how many leading blocks of the prompt were known before, on any target.
	Matched int
	// Streamed says that the answer is streamed, and Text that the blocks are of text: their tokens
	// are estimates.
	Streamed, Text bool
	// Phase is what the target does of the request.
	Phase kvscore.Phase

	lease *kvscore.Lease // of a Follower
	over  func()         // the same: see its Began
	paid  func()         // the same: see its Pays
}

// Answered is the first sign that the prefill of a request is over.
type Answered struct {
	*Booking
	Sign   kvscore.Sign
	Tokens int64 // of an answer that was not streamed; -1 is unknown
}

// Paid says who pays for a request.
type Paid struct {
	*Booking
	Payer
}

// Payer is a tenant in a class.
type Payer struct {
	Class  string
	Tenant uint64
	Weight float64 // of the tenant
}

// End is the end of a request that a target has computed.
type End struct {
	*Booking
	Computed bool
	Tokens   int64 // of the prompt, as the engine counted them; 0 is unknown
	Cached   int64 // of these, those that it had cached; -1 is unknown
	Output   int64 // tokens of the answer, as far as they were seen
	// Answer is the prompt and its answer, nil if they are unknown. AnswerTokens are the tokens of
	// both; 0 is unknown.
	Answer       *Prompt
	AnswerTokens int64
}

// Record is one record. Only the fields of its kind are set.
type Record struct {
	Kind     Kind
	At       time.Time
	Target   Target // of all kinds with a worker; of KindWorker, KindLost and KindModels without its rank
	Head     Head
	Dial     string // of KindWorker
	Booking  *Booking
	Answered Answered
	Paid     Paid
	End      End
	Drained  bool
	Version  uint64         // of KindDrained: the admin API's calls up to this one
	Binding  affinity.Saved // without its target; only the key if the session is used or unbound
	Response Response
	State    State
	Models   []Model // nil if the worker has no list
	Quota    quota.Change
	Tenant   quota.State
}

// Prompt is the blocks of a prompt. Those that it shares with an earlier one are there once.
type Prompt struct {
	root   uint64
	up     *Prompt
	shares int // blocks of up
	blocks []uint64
	depth  int

	// Weight is the milli-tokens in each of the blocks that it does not share, and Past the length
	// behind its last block, in blocks.
	Weight int64
	Past   float32
}

// Bounds of prompts. A longer prompt is told up to its bound.
const (
	maxBlocks = 64 << 10
	maxDepth  = 1 << 10
)

// Root identifies the prompt's model, LoRA, salt and kind of content.
func (p *Prompt) Root() uint64 { return p.root }

// Len returns the number of the prompt's blocks.
func (p *Prompt) Len() int { return p.shares + len(p.blocks) }

// Continues returns the prompt or the answer that this one goes on from; nil if there is none. The
// next turn of a conversation does so.
func (p *Prompt) Continues() *Prompt {
	if p.up != nil && p.shares == p.up.Len() {
		return p.up
	}
	return nil
}

// Append appends the hashes of the prompt's blocks.
func (p *Prompt) Append(b []uint64) []uint64 {
	from := len(b)
	n := p.Len()
	if cap(b)-from < n {
		b = append(make([]uint64, 0, from+n), b...)
	}
	b = b[:from+n]
	for ; p != nil; p = p.up {
		if n > p.shares {
			copy(b[from+p.shares:from+n], p.blocks)
			n = p.shares
		}
	}
	return b
}
