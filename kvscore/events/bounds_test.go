package events

import (
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

func TestDeepNesting(t *testing.T) {
	var d Decoder
	deep := func(n int) raw { return raw(strings.Repeat("\x91", n) + "\xc0") }
	b := decode(t, &d, stored("new", deep(90_000)), deep(90_000))
	check(t, b, want{events: []Event{storedEvent(nil)}, skipped: map[Reason]int{Malformed: 1}})
	if _, err := d.Decode(batchOf(deep(10_000_000))); err != ErrNotBatch {
		t.Error(err)
	}
}

// TestClaimedLengths checks that a length costs no memory unless the payload has what it
// claims.
func TestClaimedLengths(t *testing.T) {
	for _, field := range []string{"block_hashes", "token_ids", "extra_keys", "metadata", "-block_hashes", "-token_ids"} {
		claim := raw("\xdd\xff\xff\xff\xff")
		if name, within := strings.CutPrefix(field, "-"); within { // within the decoder's bounds
			field, claim = name, raw("\xdd\x00\x08\x00\x00")
		}
		payload := batchOf(stored(field, claim))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range 10 {
			var d Decoder
			if _, err := d.Decode(payload); err != ErrNotBatch {
				t.Fatal(err)
			}
		}
		runtime.ReadMemStats(&after)
		if cost := (after.TotalAlloc - before.TotalAlloc) / 10; cost > 16<<10 {
			t.Errorf("%s: %d bytes allocated for %d bytes of payload", field, cost, len(payload))
		}
	}
}

func TestBounds(t *testing.T) {
	many := func(n int, value string) raw { return raw(strings.Repeat(value, n)) }
	array := func(n int, value string) raw {
		return raw(msgp.AppendArrayHeader(nil, uint32(n))) + many(n, value)
	}
	for name, event := range map[string]any{
		"blocks":     pairs{"type", "BlockRemoved", "block_hashes", array(maxBlocks+1, "\x01")},
		"tokens":     stored("token_ids", array(maxTokens+1, "\x01")),
		"extra keys": stored("extra_keys", list(array(maxExtra+1, "\x01"), nil)),
	} {
		t.Run(name, func(t *testing.T) {
			var d Decoder
			check(t, decode(t, &d, event), want{skipped: map[Reason]int{TooLarge: 1}})
		})
	}
	t.Run("events", func(t *testing.T) {
		var d Decoder
		b, err := d.Decode(appendValue(nil, list(1.5, array(maxEvents+3, "\x91\xb0AllBlocksCleared"), 0)))
		if err != nil || len(b.Events) != maxEvents || b.Skipped[TooLarge] != 3 {
			t.Fatalf("%d events, %v", len(b.Events), err)
		}
		// A batch of this size does not cost memory forever.
		if b, err = d.Decode(batchOf(stored())); err != nil || cap(b.Events) > keepOthers {
			t.Errorf("room for %d events is kept, %v", cap(b.Events), err)
		}
	})
}

// TestBuffersGrow checks that the events of a batch stay whole when the decoder's buffers
// grow, and when events between them are left out.
func TestBuffersGrow(t *testing.T) {
	var d Decoder
	var events []any
	const n = 500
	for i := range n {
		h, token := uint64(i)<<32|1, uint32(i*300)
		events = append(
			events,
			stored(
				"block_hashes", []uint64{h, h + 1}, "token_ids", []uint32{token, token + 1, token + 2, token + 3},
				"block_size", 2, "lora_id", i+1, "extra_keys", list(nil, list(image)),
			),
			stored("block_hashes", []uint64{7}, "extra_keys", list(list("a", "b"))),
		)
	}
	b := decode(t, &d, events...)
	if len(b.Events) != n || b.Skipped[BlockSizeMismatch] != n {
		t.Fatalf("%d events, skipped %v", len(b.Events), b.Skipped)
	}
	for i, e := range b.Events {
		h, token := uint64(i)<<32|1, uint32(i*300)
		if !slices.Equal(e.Hashes, []uint64{h, h + 1}) || !slices.Equal(e.Tokens, []uint32{token, token + 1, token + 2, token + 3}) ||
			string(e.Adapter) != "lora_id:"+string(rune0(i+1)) || len(e.Extra) != 1 || e.Extra[0].Block != 1 {
			t.Fatalf("event %d: %+v", i, e)
		}
	}
}

func rune0(n int) []byte {
	if n < 10 {
		return []byte{byte('0' + n)}
	}
	return append(rune0(n/10), byte('0'+n%10))
}

func TestDecodeAllocatesNothing(t *testing.T) {
	payloads := append(fixtures(t, "fixtures.txt"), fixtures(t, "vllm-events.txt")...)
	payloads = append(payloads, fixture{"long", blocksBatch(512, 1)})
	for _, f := range payloads {
		var d Decoder
		allocs := testing.AllocsPerRun(20, func() {
			if _, err := d.Decode(f.payload); err != nil {
				t.Fatal(err)
			}
		})
		if allocs != 0 {
			t.Errorf("%s: %v allocations a batch", f.name, allocs)
		}
	}
}

// blocksBatch is a batch as vLLM publishes it: n events of blocks of 16 tokens.
func blocksBatch(blocks, n int) []byte {
	random := rand.New(rand.NewPCG(3, 4))
	var events []any
	for range n {
		hashes, ids := make([]uint64, blocks), make([]uint32, 16*blocks)
		for i := range hashes {
			hashes[i] = random.Uint64() | 1<<63
		}
		for i := range ids {
			ids[i] = uint32(math.Pow(150000, random.Float64())) // common tokens have small numbers
		}
		events = append(events, pairs{
			"type", "BlockStored", "block_hashes", hashes, "parent_block_hash", random.Uint64(), "token_ids", ids,
			"block_size", 16, "lora_id", nil, "medium", "GPU", "lora_name", nil, "extra_keys", make([]any, blocks),
			"group_idx", 0, "kv_cache_spec_kind", "full_attention",
		})
	}
	return batchOf(events...)
}

func BenchmarkDecode(b *testing.B) {
	for name, blocks := range map[string]int{"1": 1, "8": 8, "64": 64} {
		b.Run("blocks="+name, func(b *testing.B) {
			const n = 32
			payload := blocksBatch(blocks, n)
			b.SetBytes(int64(len(payload)))
			var d Decoder
			for b.Loop() {
				if batch, err := d.Decode(payload); err != nil || len(batch.Events) != n {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)*n*float64(blocks)/b.Elapsed().Seconds()/1e6, "Mblocks/s")
		})
	}
}
