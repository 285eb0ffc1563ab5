package publisher

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// decoded reads any msgpack.
func decoded(t *testing.T, b []byte) any {
	t.Helper()
	v, rest, err := msgp.ReadIntfBytes(b)
	if err != nil || len(rest) > 0 {
		t.Fatalf("reading msgpack: %v, %d bytes left", err, len(rest))
	}
	return v
}

func integer(v any) uint64 {
	switch n := v.(type) {
	case int64:
		return uint64(n)
	case uint64:
		return n
	case []byte:
		return binary.BigEndian.Uint64(n[24:])
	}
	return 0
}

func integers[T ~uint32 | ~uint64](v any) (out []T) {
	list, _ := v.([]any)
	for _, n := range list {
		out = append(out, T(integer(n)))
	}
	return out
}

// understood turns a captured event back into what it was made of.
func understood(m map[string]any) (e Event) {
	e.Hashes, e.Tokens = integers[uint64](m["block_hashes"]), integers[uint32](m["token_ids"])
	e.Medium, _ = m["medium"].(string)
	switch m["type"] {
	case "BlockRemoved":
		e.Kind = Removed
		return e
	case "AllBlocksCleared":
		e.Kind = Cleared
		return e
	}
	e.First, e.Parent = m["parent_block_hash"] == nil, integer(m["parent_block_hash"])
	e.BlockSize, e.LoRAID = int(integer(m["block_size"])), int(integer(m["lora_id"]))
	e.LoRA, _ = m["lora_name"].(string)
	e.Session, _ = m["session_id"].(string)
	if keys, _ := m["extra_keys"].([]any)[0].([]any); len(keys) > 0 && keys[len(keys)-1] != e.LoRA {
		e.Salt = keys[len(keys)-1].(string)
	}
	return e
}

// TestBytesOfARealEngine reads batches that a vLLM 0.32.0 published, and writes them
// again: byte for byte the same. Of hashes of 32 bytes only the last 8 can be the same.
func TestBytesOfARealEngine(t *testing.T) {
	data, err := os.ReadFile("testdata/vllm-0.32.0.txt")
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]int)
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) != 3 || fields[0] != "seq" {
			continue
		}
		payload, err := hex.DecodeString(fields[2])
		if err != nil {
			t.Fatal(err)
		}
		doc := decoded(t, payload).([]any)
		ts := doc[0].(float64)
		batch := &Batch{Time: time.Unix(0, int64(ts*1e9)), Rank: int(integer(doc[2]))}
		form := Form{}
		for _, m := range doc[1].([]any) {
			e := understood(m.(map[string]any))
			batch.Events = append(batch.Events, e)
			seen[m.(map[string]any)["type"].(string)]++
			for name, ok := range map[string]bool{"lora": e.LoRA != "", "salt": e.Salt != "", "session": e.Session != "", "parent": e.Kind == Stored && !e.First} {
				if ok {
					seen[name]++
				}
			}
			if hashes, _ := m.(map[string]any)["block_hashes"].([]any); len(hashes) > 0 {
				if _, ok := hashes[0].([]byte); ok {
					form.Hashes = Bytes
					seen["bytes"]++
				}
			}
		}
		got := form.Append(nil, batch)
		want := bytes.Clone(payload)
		copy(got[2:10], want[2:10]) // the time is not exact in nanoseconds
		if form.Hashes == Bytes {
			blankDigests(got)
			blankDigests(want)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("batch %s:\n got %x\nwant %x", fields[1], got, want)
		}
	}
	for _, what := range []string{"BlockStored", "BlockRemoved", "AllBlocksCleared", "lora", "salt", "session", "parent", "bytes"} {
		if seen[what] == 0 {
			t.Errorf("no event with %s", what)
		}
	}
}

// blankDigests overwrites the first 24 bytes of each msgpack value of 32 bytes.
func blankDigests(b []byte) {
	for i := bytes.Index(b, []byte{0xc4, 32}); i >= 0; {
		clear(b[i+2 : i+26])
		next := bytes.Index(b[i+34:], []byte{0xc4, 32})
		if next < 0 {
			return
		}
		i += 34 + next
	}
}
