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
	// Session is the id of the request's session. Default: none.
	Session string
	// Medium is where the blocks are. A TensorRT-LLM does not tell.
	Medium string
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

// Hashes is how the name of a block is written.
type Hashes uint8

// The ways to write hashes.
const (
	Unsigned Hashes = iota
	Signed
	// Bytes is 32 bytes, of which the last 8 are the number in big-endian order.
	Bytes
)

// Form is how batches are written.
type Form struct {
	Dialect Dialect
	// Arrays has events as arrays: a vLLM up to 0.23. Default: maps in a batch that is an array, as
	// with a vLLM since 0.24, an SGLang since September 2026 and a TensorRT-LLM.
	Arrays bool
	Hashes Hashes
}

// Append appends a batch as msgpack.
func (f Form) Append(b []byte, batch *Batch) []byte {
	b = msgp.AppendFloat64(msgp.AppendArrayHeader(b, 3), float64(batch.Time.UnixNano())/1e9)
	b = msgp.AppendArrayHeader(b, uint32(len(batch.Events)))
	for i := range batch.Events {
		members := f.members(&batch.Events[i])
		if !f.Arrays {
			b = f.appendValue(b, members)
			continue
		}
		b = msgp.AppendArrayHeader(b, uint32(len(members)))
		for _, m := range members {
			b = f.appendValue(b, m.value)
		}
	}
	return f.appendValue(b, batch.Rank)
}

// member is one member of an event.
type member struct {
	name  string
	value any
}

// name is that of a block.
type name uint64

// members returns an event's members in the order in which the engine writes them.
func (f Form) members(e *Event) []member {
	out := []member{{"type", [...]string{"BlockStored", "BlockRemoved", "AllBlocksCleared"}[e.Kind]}}
	if e.Kind == Cleared {
		return out
	}
	names := make([]any, len(e.Hashes))
	for i, h := range e.Hashes {
		names[i] = name(h)
	}
	out = append(out, member{"block_hashes", names})
	if e.Kind == Stored {
		var parent, adapter any
		if !e.First {
			parent = name(e.Parent)
		}
		if e.LoRAID != 0 && f.Dialect != SGLang { // which never tells it
			adapter = e.LoRAID
		}
		out = append(out, member{"parent_block_hash", parent}, member{"token_ids", e.Tokens}, member{"block_size", e.BlockSize}, member{"lora_id", adapter})
	}
	if f.Dialect == TRTLLM {
		return out
	}
	out = append(out, member{"medium", e.Medium})
	switch {
	case f.Dialect == VLLM && e.Kind == Removed:
		return append(out, member{"group_idx", 0})
	case f.Dialect == VLLM:
		out = append(out, member{"lora_name", orNil(e.LoRA)}, member{"extra_keys", extraKeys(e)}, member{"group_idx", 0}, member{"kv_cache_spec_kind", "full_attention"})
	case e.Salt != "":
		out = append(out, member{"cache_salt", e.Salt})
	}
	if e.Session != "" && !f.Arrays {
		out = append(out, member{"session_id", e.Session})
	}
	return out
}

// extraKeys returns null for each block, or a list with the adapter's name. The list of a
// prompt's first block also has the salt.
func extraKeys(e *Event) []any {
	list := make([]any, len(e.Hashes))
	for i := range list {
		var keys []any
		if e.LoRA != "" {
			keys = append(keys, e.LoRA)
		}
		if i == 0 && e.First && e.Salt != "" {
			keys = append(keys, e.Salt)
		}
		if keys != nil {
			list[i] = keys
		}
	}
	return list
}

func orNil(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// appendValue appends the value of a member. Numbers are as short as msgspec writes them, and unsigned
// from 0 on.
func (f Form) appendValue(b []byte, v any) []byte {
	switch v := v.(type) {
	case string:
		return msgp.AppendString(b, v)
	case name:
		return f.appendName(b, uint64(v))
	case int:
		if v < 0 {
			return msgp.AppendInt64(b, int64(v))
		}
		return msgp.AppendUint64(b, uint64(v))
	case []uint32:
		b = msgp.AppendArrayHeader(b, uint32(len(v)))
		for _, token := range v {
			b = msgp.AppendUint32(b, token)
		}
		return b
	case []any:
		b = msgp.AppendArrayHeader(b, uint32(len(v)))
		for _, element := range v {
			b = f.appendValue(b, element)
		}
		return b
	case []member:
		b = msgp.AppendMapHeader(b, uint32(len(v)))
		for _, m := range v {
			b = f.appendValue(msgp.AppendString(b, m.name), m.value)
		}
		return b
	}
	return msgp.AppendNil(b)
}

func (f Form) appendName(b []byte, h uint64) []byte {
	switch {
	case f.Hashes == Signed && int64(h) < 0:
		return msgp.AppendInt64(b, int64(h))
	case f.Hashes == Bytes:
		var digest [32]byte
		for i := range 3 {
			binary.BigEndian.PutUint64(digest[8*i:], xxh3.HashSeed(digest[:8*i], h))
		}
		binary.BigEndian.PutUint64(digest[24:], h)
		return msgp.AppendBytes(b, digest[:])
	}
	return msgp.AppendUint64(b, h)
}
