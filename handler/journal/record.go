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
//	8 bytes   the time, Unix milliseconds
//	4 bytes   prompts since the last KindEpoch
//	          records: kind (1 byte), and in CBOR (RFC 8949) what all kinds have and what this one has
//	8 bytes   XXH3 of all but the length
//
// Numbers outside of the records begin with their lowest byte. A reader skips kinds and fields that it
// does not know, so newer versions may add both.
//
// An epoch starts with a [KindEpoch] record. A [KindWorker] record gives the address of a worker's id, and
// prompts have numbers; both are valid in their epoch only. A prompt is an earlier one, the number of blocks that it shares with that, and its
// further blocks, of 8 bytes. If an entry is lost, prompts that build on its prompts are unknown. A
// request that has not ended goes on in the next epoch of the same run.
package journal

import (
	"encoding/binary"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/texts"
)

// version is that of the format. It must also grow if the hashes of sessions or of prompts change.
const version = 3

// Kind is the kind of a record.
type Kind byte

// The kinds of records. The numbers are part of the format.
const (
	// KindEpoch starts an epoch: a run of a router, a file, or a part of a stream that is understood by itself.
	KindEpoch Kind = iota + 1
	// KindWorker gives a worker's id its address.
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
	// KindModels is a worker's list of its models.
	KindModels
	// KindPaid says who pays for a request. Logs on disk do without.
	KindPaid
	// KindQuota is a change of what a tenant has used, and KindTenant how its account stands.
	KindQuota
	KindTenant
)

// bodies make what the records of a kind have besides. KindUsed and KindUnbound have a binding's key and version
// only, and KindModels has nil if the worker has no list.
var bodies = [...]func() any{
	KindEpoch: body[Head], KindWorker: body[Address], KindBooked: body[Booking], KindEnded: body[End],
	KindBound: body[affinity.Saved], KindUsed: body[affinity.Saved], KindUnbound: body[affinity.Saved],
	KindResponse: body[Response], KindLost: body[Lost], KindState: body[State], KindAnswered: body[Answered],
	KindDrained: body[Drain], KindModels: body[[]Model], KindPaid: body[Payer], KindQuota: body[quota.Change], KindTenant: body[quota.State],
}

func body[T any]() any { return new(T) }

// ofWorker returns whether the records of the kind have a target.
func (k Kind) ofWorker() bool {
	switch k { //nolint:exhaustive // the others have none
	case KindBooked, KindBound, KindResponse, KindLost, KindDrained, KindModels:
		return true
	}
	return false
}

// Record is one record.
type Record struct {
	Kind Kind
	At   time.Time
	// Target is that of kinds with a worker, in KindWorker, KindLost, KindDrained and KindModels without its
	// rank. The ids of workers are those of the router that wrote the record.
	Target kvscore.Target
	// Request is the number of a request, 0 if the kind has none, and Booking that request, if it was read.
	Request uint64
	Booking *Booking
	// Body is a pointer to what the kind has besides: see bodies.
	Body any
}

// common is what each record begins with.
type common struct {
	_       struct{} `cbor:",toarray"`
	After   int64    // the time since that of the entry, in milliseconds
	Request int64    // what the number of the request is more than the last one in the entry
	Worker  uint64
	Rank    uint32
}

// Head is what must be known before all else.
type Head struct {
	Secret  affinity.Secret // of the hashes of sessions
	Seed    uint64          // of the hashes of prompts
	Version affinity.Version
	// TextBlock is the bytes in a block of prompt text, and BlockSize the tokens in a KV block.
	TextBlock int
	BlockSize int
	// Run is a random number of the run, of the encoder. Requests have numbers of their own in each.
	Run uint64
	// Name is the router's, and Keys identifies its secret and seed.
	Name string
	Keys uint64
}

// State is what was learned, and what is known of the workers. Targets name workers by the ids in
// Workers.
type State struct {
	Workers []Worker
	Learned kvscore.Learned
	Ratios  []texts.ModelRatios
}

// Worker is a worker by its address: its id may change.
type Worker struct {
	Dial   string
	ID     uint64
	BootID string    // what the engine reported of its start, empty if nothing
	Seen   time.Time // when it was last an upstream, in seconds
}

// Address gives the id of a worker its address.
type Address string

// Lost says that a worker has lost its KV cache.
type Lost struct{}

// Model is a model in a worker's list.
type Model struct {
	ID      string `cbor:"1,keyasint"`
	Adapter bool   `cbor:"2,keyasint,omitempty"` // a LoRA adapter of another model
}

// Response is a response that an engine keeps.
type Response struct {
	Hash    uint64            `cbor:"1,keyasint"` // of its id
	Session affinity.Identity `cbor:"2,keyasint"`
}

// Drain says that the drain of a worker begins or ends.
type Drain struct {
	Drains  bool   `cbor:"1,keyasint,omitempty"`
	Version uint64 `cbor:"2,keyasint,omitempty"` // the admin API's calls up to this one
}

// Booking is a request that was sent to a target.
type Booking struct {
	At       time.Time      `cbor:"-"`
	Target   kvscore.Target `cbor:"-"`
	Prompt   *Prompt        `cbor:"1,keyasint,omitempty"` // nil if it is unknown
	Tokens   int64          `cbor:"2,keyasint,omitempty"` // of the prompt, about
	Expected int64          `cbor:"3,keyasint,omitempty"` // tokens of the answer; 0 is unknown
	// Matched is how many leading blocks of the prompt were known before, on any target.
	Matched int `cbor:"4,keyasint,omitempty"`
	// Streamed says that the answer is streamed, and Text that the blocks are of text: their tokens
	// are estimates.
	Streamed bool `cbor:"5,keyasint,omitempty"`
	Text     bool `cbor:"6,keyasint,omitempty"`
	// Phase is what the target does of the request.
	Phase kvscore.Phase `cbor:"7,keyasint,omitempty"`

	lease    *kvscore.Lease // of a Follower
	onEnd    func()         // see Follower.Began
	afterEnd func()         // see Follower.Pays
}

// Answered is the first sign that the prefill of a request is over.
type Answered struct {
	Sign   kvscore.Sign `cbor:"1,keyasint,omitempty"`
	Tokens int64        `cbor:"2,keyasint,omitempty"` // of an answer that was not streamed; -1 is unknown
}

// Payer is a tenant in a class. It pays for a request.
type Payer struct {
	Class  string  `cbor:"1,keyasint,omitempty"`
	Tenant uint64  `cbor:"2,keyasint,omitempty"`
	Weight float64 `cbor:"3,keyasint,omitempty"` // of the tenant
}

// End is the end of a request.
type End struct {
	Computed bool  `cbor:"1,keyasint,omitempty"` // a target has computed it
	Tokens   int64 `cbor:"2,keyasint,omitempty"` // of the prompt, as the engine counted them; 0 is unknown
	Cached   int64 `cbor:"3,keyasint,omitempty"` // of these, those that it had cached; -1 is unknown
	Output   int64 `cbor:"4,keyasint,omitempty"` // tokens of the answer, as far as they were seen
	// Answer is the prompt and its answer, nil if they are unknown. AnswerTokens are the tokens of
	// both; 0 is unknown.
	Answer       *Prompt `cbor:"5,keyasint,omitempty"`
	AnswerTokens int64   `cbor:"6,keyasint,omitempty"`
}

// Prompt is the blocks of a prompt. Those that it shares with an earlier one are there once.
type Prompt struct {
	ParentNumber int    `cbor:"1,keyasint,omitempty"` // number of the earlier one; 0 if there is none, and in an answer
	Shares       int    `cbor:"2,keyasint,omitempty"` // blocks of that
	Root         uint64 `cbor:"3,keyasint,omitempty"` // identifies the model, LoRA, salt and kind of content
	Blocks       []byte `cbor:"4,keyasint,omitempty"` // the further ones
	// Weight is the milli-tokens in each of the blocks that it does not share, and Past the length
	// behind its last block, in blocks.
	Weight int64   `cbor:"5,keyasint,omitempty"`
	Past   float32 `cbor:"6,keyasint,omitempty"`

	parent *Prompt // the earlier one
	depth  int
}

// Bounds of prompts. A longer prompt is recorded up to its bound.
const (
	maxBlocks = 64 << 10
	maxDepth  = 1 << 10
)

// Len returns the number of the prompt's blocks.
func (p *Prompt) Len() int { return p.Shares + len(p.Blocks)/8 }

// Continues returns the prompt or the answer that this one goes on from; nil if there is none. The
// next turn of a conversation does so.
func (p *Prompt) Continues() *Prompt {
	if p.parent != nil && p.Shares == p.parent.Len() {
		return p.parent
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
	for ; p != nil; p = p.parent {
		for i := p.Shares; i < n; i++ {
			b[from+i] = binary.LittleEndian.Uint64(p.Blocks[8*(i-p.Shares):])
		}
		n = min(n, p.Shares)
	}
	return b
}
