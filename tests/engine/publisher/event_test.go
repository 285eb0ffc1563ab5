package publisher

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
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
		return uint64(n[31]) | uint64(n[30])<<8 | uint64(n[29])<<16 | uint64(n[28])<<24 |
			uint64(n[27])<<32 | uint64(n[26])<<40 | uint64(n[25])<<48 | uint64(n[24])<<56
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
		form := Form{Encoding: Maps, Hashes: Unsigned}
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

// stored is an event of two blocks.
func stored(more func(*Event)) Event {
	e := Event{Kind: Stored, Hashes: []uint64{1 << 63, 7}, Parent: 5, Tokens: []uint32{1, 2, 3, 70000}, BlockSize: 2, Medium: "GPU"}
	if more != nil {
		more(&e)
	}
	return e
}

// TestLayouts checks the layouts that were not captured, member by member.
func TestLayouts(t *testing.T) {
	full := func(e *Event) { e.LoRA, e.LoRAID, e.Salt, e.Session, e.First = "a", 2, "s", "x", true }
	removed := Event{Kind: Removed, Hashes: []uint64{9}, Medium: "CPU_PINNED"}
	for name, tc := range map[string]struct {
		form  Form
		event Event
		want  string // of the event, as it is printed
	}{
		"arrays": {Form{VLLM, Arrays, Unsigned}, stored(nil), "[BlockStored [9223372036854775808 7] 5 [1 2 3 70000] 2 <nil> GPU <nil> [<nil> <nil>] 0 full_attention]"},
		"arrays with an adapter": {
			Form{VLLM, Arrays, Unsigned},
			stored(full),
			"[BlockStored [9223372036854775808 7] <nil> [1 2 3 70000] 2 2 GPU a [[a s] [a]] 0 full_attention]",
		},
		"arrays, removed":        {Form{VLLM, Arrays, Unsigned}, removed, "[BlockRemoved [9] CPU_PINNED 0]"},
		"arrays, cleared":        {Form{VLLM, Arrays, Unsigned}, Event{Kind: Cleared}, "[AllBlocksCleared]"},
		"SGLang":                 {Form{SGLang, Maps, Signed}, stored(nil), "type block_hashes parent_block_hash token_ids block_size lora_id medium"},
		"SGLang with a salt":     {Form{SGLang, Maps, Signed}, stored(full), "type block_hashes parent_block_hash token_ids block_size lora_id medium cache_salt session_id"},
		"SGLang, removed":        {Form{SGLang, Maps, Signed}, removed, "type block_hashes medium"},
		"SGLang, arrays":         {Form{SGLang, Arrays, Signed}, stored(nil), "[BlockStored [-9223372036854775808 7] 5 [1 2 3 70000] 2 <nil> GPU]"},
		"SGLang, arrays, salt":   {Form{SGLang, Arrays, Signed}, stored(full), "[BlockStored [-9223372036854775808 7] <nil> [1 2 3 70000] 2 <nil> GPU map[cache_salt:s session_id:x]]"},
		"TensorRT-LLM":           {Form{TRTLLM, Maps, Unsigned}, stored(full), "type block_hashes parent_block_hash token_ids block_size lora_id"},
		"TensorRT-LLM, removed":  {Form{TRTLLM, Maps, Unsigned}, removed, "type block_hashes"},
		"vLLM, no session":       {Form{VLLM, Maps, Unsigned}, stored(nil), "type block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx kv_cache_spec_kind"},
		"maps in a map, removed": {Form{VLLM, AllMaps, Unsigned}, removed, "type block_hashes medium group_idx"},
	} {
		t.Run(name, func(t *testing.T) {
			b := tc.form.Append(nil, &Batch{Time: time.Unix(3, 0), Rank: 1, Events: []Event{tc.event}})
			var events []any
			if tc.form.Encoding == AllMaps {
				doc := decoded(t, b).(map[string]any)
				events = doc["events"].([]any)
				if doc["ts"] != 3.0 || integer(doc["data_parallel_rank"]) != 1 || len(doc) != 3 {
					t.Errorf("batch %v", doc)
				}
			} else {
				doc := decoded(t, b).([]any)
				events = doc[1].([]any)
				if doc[0] != 3.0 || integer(doc[2]) != 1 || len(doc) != 3 {
					t.Errorf("batch %v", doc)
				}
			}
			if got := shape(t, tc.form, events[0], b); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

// shape returns an array as it is printed, or a map's names in order.
func shape(t *testing.T, f Form, event any, raw []byte) string {
	t.Helper()
	if f.Encoding == Arrays {
		return fmt.Sprint(event)
	}
	m := event.(map[string]any)
	names := make([]string, 0, len(m))
	for n := range m {
		names = append(names, n)
	}
	slices.SortFunc(names, func(a, b string) int {
		return bytes.Index(raw, msgp.AppendString(nil, a)) - bytes.Index(raw, msgp.AppendString(nil, b))
	})
	return strings.Join(names, " ")
}

// TestHashes has the same block by three names, all of which end in the same 64 bits.
func TestHashes(t *testing.T) {
	const name = 0xfedcba9876543210
	for _, h := range []Hashes{Unsigned, Signed, Bytes} {
		b := Form{VLLM, Maps, h}.Append(nil, &Batch{Time: time.Now(), Events: []Event{{Kind: Removed, Hashes: []uint64{name}}}})
		m := decoded(t, b).([]any)[1].([]any)[0].(map[string]any)
		if got := integer(m["block_hashes"].([]any)[0]); got != name {
			t.Errorf("%s: %x", h, got)
		}
	}
}
