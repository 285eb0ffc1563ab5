// Package events reads the KV events that engines publish. It tells the caches which blocks an
// engine stored, removed or cleared, and in which tier.
//
// A [Stream] follows one publisher and hands its payloads, in order, to a [Recorder]. The
// recorder's [Decoder] reads them, and the recorder puts them into the caches. Nothing here
// decides where a request goes.
package events

import "github.com/caddy-kvrouter/kvrouter/kvscore/cache"

// Kind is what happened to an event's blocks.
type Kind uint8

// The kinds of events.
const (
	// Stored blocks are in the event's tier now. An engine may store a block twice, and
	// then removes it twice.
	Stored Kind = iota + 1
	// Removed blocks left the event's tier once.
	Removed
	// Cleared is the end of all blocks in all tiers. The event has no other fields.
	Cleared
)

// Event is one change of an engine's KV cache. Its slices are valid until the next call of
// [Decoder.Decode] and must not be changed.
type Event struct {
	Kind Kind
	Tier cache.Tier
	// Hashes are the engine's own names of the blocks, in order. Byte strings are folded into
	// their last 8 bytes, big-endian.
	Hashes []uint64
	// Parent is the name of the block before the first, valid if HasParent. A Stored event
	// with tokens and without a parent begins at the prompt's first token.
	Parent    uint64
	HasParent bool
	// Tokens are the blocks' tokens: len(Hashes) * BlockSize. SGLang with EAGLE publishes pairs
	// of adjacent tokens; Tokens are the first ones of these. Tokens is nil in a Stored event
	// that only names blocks, for example of an offload. These blocks are known from
	// another tier if at all, and the event says nothing about where they belong.
	Tokens []uint32
	// BlockSize is the number of tokens in a block; 0 if unknown and Tokens is nil.
	BlockSize int
	// Adapter is the LoRA adapter's name. If the engine sends only its id, the name is
	// "lora_id:" and the id in decimal. Empty means the base model.
	Adapter []byte
	// Salt is the cache salt, empty if none. vLLM sends it only with a
	// prompt's first block, so an event with a parent has its parent's salt.
	Salt []byte
	// Session is the session that the request named for which the engine stored the blocks; empty if
	// none.
	Session []byte
	// Extra are the keys other than tokens, adapter and salt on which the blocks' content
	// depends, as with images; nil if there are none. A block with such a key differs from
	// all blocks of tokens alone.
	Extra []ExtraKey
}

// ExtraKey is something other than tokens on which the content of a block depends.
type ExtraKey struct {
	// Block is the block's place in the event.
	Block int
	// Key is as published: the text of a string, else the msgpack encoding.
	Key []byte
}

// Batch is what an engine published at once.
type Batch struct {
	// Time is when the engine made the batch, in seconds since 1970; 0 if unknown.
	Time float64
	// Rank is the data-parallel rank that the batch names, -1 if it names none.
	Rank   int
	Events []Event
	// Skipped counts the events that the decoder left out, by reason.
	Skipped [Reasons]int
}

// Reason is why an event, or a whole batch, was not used.
type Reason uint8

// The reasons. The decoder finds those up to TooLarge.
const (
	// Malformed events lack a field or have one of a wrong type.
	Malformed Reason = iota
	// UnknownTag events have a type that the decoder does not know.
	UnknownTag
	// UnknownMedium events concern a medium that belongs to no [cache.Tier].
	UnknownMedium
	// NotMainAttention events concern other layers than those of full attention.
	NotMainAttention
	// Remote events concern blocks that are not local to the worker.
	Remote
	// BlockSizeMismatch events have more or fewer tokens than their blocks hold.
	BlockSizeMismatch
	// TooLarge events exceed a bound of the decoder.
	TooLarge
	// OtherSize events have blocks of another size than the first.
	OtherSize
	// OtherRank batches are of ranks that the router does not know.
	OtherRank
	// Undecoded payloads are no batches.
	Undecoded
	// UnknownParent, Contradiction and NoRoom events have blocks that the index refused: see
	// [cache.Outcome].
	UnknownParent
	Contradiction
	NoRoom
	// Reasons is the number of reasons.
	Reasons = iota
)

var reasonNames = [Reasons]string{
	"malformed", "unknown_tag", "unknown_medium", "not_main_attention", "remote", "block_size_mismatch", "too_large",
	"other_block_size", "other_rank", "undecoded_batch", "unknown_parent", "contradiction", "no_room",
}

// String returns the reason as a metric's label.
func (r Reason) String() string { return reasonNames[r] }
