package publisher

import (
	"encoding/binary"
	"time"

	"github.com/tinylib/msgp/msgp"
	"github.com/zeebo/xxh3"
)

// Kind is what an event tells.
type Kind uint8

// The kinds.
const (
	Stored Kind = iota
	Removed
	Cleared
)

// Event is one KV event.
type Event struct {
	Kind Kind
	// Hashes name the blocks, in the order of the prompt.
	Hashes []uint64
	// Parent names the block before the first, unless First says that there is none.
	Parent uint64
	First  bool
	// Tokens are those of all blocks, BlockSize in each.
	Tokens    []uint32
	BlockSize int
	// LoRA is the adapter's name, and LoRAID its number from 1. Default: none.
	LoRA   string
	LoRAID int
	// Salt is the cache salt. Default: none.
	Salt string
	// Media are those of each block. Default: none.
	Media [][]Media
	// Session is the id of the request's session. Default: none.
	Session string
	// Medium is where the blocks are. A TensorRT-LLM does not tell.
	Medium string
}

// Media is an image or other media in a block. Offset is its first token in the block,
// negative if it begins earlier.
type Media struct {
	Identifier string
	Offset     int
}

// Batch is what one step of a rank changed.
type Batch struct {
	Time   time.Time
	Rank   int
	Events []Event
}

// Dialect is the engine whose members events have.
type Dialect uint8

// The dialects.
const (
	VLLM Dialect = iota
	SGLang
	TRTLLM
)

// Encoding is how batches and events are laid out.
type Encoding string

// The encodings.
const (
	// Maps has events as maps in a batch that is an array: vLLM since 0.24, SGLang
	// since September 2026, TensorRT-LLM.
	Maps Encoding = "map"
	// Arrays has events as arrays, too: vLLM up to 0.23.
	Arrays Encoding = "array"
)

// Hashes is how the name of a block is written.
type Hashes string

// The ways to write hashes.
const (
	Unsigned Hashes = "u64"
	Signed   Hashes = "i64"
	// Bytes is 32 bytes, of which the last 8 are the number in big-endian order.
	Bytes Hashes = "bytes"
)

// Form is how batches are written.
type Form struct {
	Dialect  Dialect
	Encoding Encoding
	Hashes   Hashes
}

// Append appends a batch as msgpack.
func (f Form) Append(b []byte, batch *Batch) []byte {
	ts := float64(batch.Time.UnixNano()) / 1e9
	b = msgp.AppendFloat64(msgp.AppendArrayHeader(b, 3), ts)
	return appendCount(f.appendEvents(b, batch.Events), batch.Rank)
}

func (f Form) appendEvents(b []byte, events []Event) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for i := range events {
		b = f.appendEvent(b, &events[i])
	}
	return b
}

// member is one member of an event: its name, and what appends its value.
type member struct {
	name  string
	value func([]byte) []byte
}

func (f Form) appendEvent(b []byte, e *Event) []byte {
	members := f.members(e)
	if f.Encoding == Arrays {
		b = msgp.AppendArrayHeader(b, uint32(len(members)))
		for _, m := range members {
			b = m.value(b)
		}
		return b
	}
	b = msgp.AppendMapHeader(b, uint32(len(members)))
	for _, m := range members {
		b = m.value(msgp.AppendString(b, m.name))
	}
	return b
}

// members returns an event's members in the order in which the engine writes them.
func (f Form) members(e *Event) []member {
	out := []member{{"type", text([]string{"BlockStored", "BlockRemoved", "AllBlocksCleared"}[e.Kind])}}
	hashes := member{"block_hashes", func(b []byte) []byte { return f.appendHashes(b, e.Hashes) }}
	medium := member{"medium", text(e.Medium)}
	switch {
	case e.Kind == Stored:
		out = append(out, hashes, member{"parent_block_hash", func(b []byte) []byte { return f.appendParent(b, e) }},
			member{"token_ids", func(b []byte) []byte { return appendTokens(b, e.Tokens) }},
			member{"block_size", func(b []byte) []byte { return appendCount(b, e.BlockSize) }},
			member{"lora_id", f.loraID(e)})
		return append(out, f.storedTail(e, medium)...)
	case e.Kind == Removed && f.Dialect == VLLM:
		return append(out, hashes, medium, member{"group_idx", appendZero})
	case e.Kind == Removed && f.Dialect == SGLang:
		return append(out, hashes, medium)
	case e.Kind == Removed:
		return append(out, hashes)
	}
	return out
}

// storedTail returns the members in which engines differ.
func (f Form) storedTail(e *Event, medium member) []member {
	switch f.Dialect {
	case VLLM:
		tail := []member{
			medium,
			{"lora_name", textOrNil(e.LoRA)},
			{"extra_keys", func(b []byte) []byte { return appendExtraKeys(b, e) }},
			{"group_idx", appendZero},
			{"kv_cache_spec_kind", text("full_attention")},
		}
		if e.Session != "" && f.Encoding != Arrays {
			tail = append(tail, member{"session_id", text(e.Session)})
		}
		return tail
	case SGLang:
		tail, more := []member{medium}, metadata(e)
		if f.Encoding != Arrays {
			return append(tail, more...)
		}
		if len(more) > 0 {
			tail = append(tail, member{"metadata", func(b []byte) []byte {
				b = msgp.AppendMapHeader(b, uint32(len(more)))
				for _, m := range more {
					b = m.value(msgp.AppendString(b, m.name))
				}
				return b
			}})
		}
		return tail
	case TRTLLM:
	}
	return nil
}

// metadata returns what an SGLang adds for requests with a salt or a session.
func metadata(e *Event) (out []member) {
	if e.Salt != "" {
		out = append(out, member{"cache_salt", text(e.Salt)})
	}
	if e.Session != "" {
		out = append(out, member{"session_id", text(e.Session)})
	}
	return out
}

// loraID appends an adapter's number; an SGLang never tells it.
func (f Form) loraID(e *Event) func([]byte) []byte {
	if e.LoRAID == 0 || f.Dialect == SGLang {
		return msgp.AppendNil
	}
	return func(b []byte) []byte { return appendCount(b, e.LoRAID) }
}

// appendExtraKeys appends null for each block, or a list with the adapter's name and the
// media. The list of a prompt's first block also has the salt.
func appendExtraKeys(b []byte, e *Event) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(e.Hashes)))
	for i := range e.Hashes {
		var keys []func([]byte) []byte
		if e.LoRA != "" {
			keys = append(keys, text(e.LoRA))
		}
		if e.Media != nil {
			for _, m := range e.Media[i] {
				keys = append(keys, m.appendTo)
			}
		}
		if i == 0 && e.First && e.Salt != "" {
			keys = append(keys, text(e.Salt))
		}
		if len(keys) == 0 {
			b = msgp.AppendNil(b)
			continue
		}
		b = msgp.AppendArrayHeader(b, uint32(len(keys)))
		for _, key := range keys {
			b = key(b)
		}
	}
	return b
}

// appendTo appends a pair, as vLLM does since 0.19.
func (m Media) appendTo(b []byte) []byte {
	b = msgp.AppendString(msgp.AppendArrayHeader(b, 2), m.Identifier)
	if m.Offset < 0 {
		return msgp.AppendInt64(b, int64(m.Offset))
	}
	return appendCount(b, m.Offset)
}

func text(s string) func([]byte) []byte {
	return func(b []byte) []byte { return msgp.AppendString(b, s) }
}

func textOrNil(s string) func([]byte) []byte {
	if s == "" {
		return msgp.AppendNil
	}
	return text(s)
}

func appendZero(b []byte) []byte { return appendCount(b, 0) }

// appendCount appends a number from 0 on, as unsigned and as short as msgspec does.
func appendCount(b []byte, n int) []byte { return msgp.AppendUint64(b, uint64(n)) }

func appendTokens(b []byte, tokens []uint32) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(tokens)))
	for _, t := range tokens {
		b = msgp.AppendUint32(b, t)
	}
	return b
}

func (f Form) appendHashes(b []byte, hashes []uint64) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(hashes)))
	for _, h := range hashes {
		b = f.appendHash(b, h)
	}
	return b
}

func (f Form) appendParent(b []byte, e *Event) []byte {
	if e.First {
		return msgp.AppendNil(b)
	}
	return f.appendHash(b, e.Parent)
}

func (f Form) appendHash(b []byte, h uint64) []byte {
	switch f.Hashes {
	case Signed:
		if n := int64(h); n < 0 {
			return msgp.AppendInt64(b, n)
		}
	case Bytes:
		var digest [32]byte
		for i := range 3 {
			binary.BigEndian.PutUint64(digest[8*i:], xxh3.HashSeed(digest[:8*i], h))
		}
		binary.BigEndian.PutUint64(digest[24:], h)
		return msgp.AppendBytes(b, digest[:])
	case Unsigned:
	}
	return msgp.AppendUint64(b, h)
}
