package cache

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"
)

// TestTokenHash compares blocks of all sizes. Their neighbours differ in one bit, in the order of
// two ids, in the size or in the seed.
func TestTokenHash(t *testing.T) {
	key, other := NewTokenHash(7), NewTokenHash(7+1)
	seen := make(map[uint64][]uint32)
	add := func(ids []uint32) {
		t.Helper()
		h := key.AppendBlocks(nil, ids, len(ids))[0]
		if old, ok := seen[h]; ok && !slices.Equal(old, ids) {
			t.Fatalf("%v and %v have one hash", old, ids)
		}
		seen[h] = slices.Clone(ids)
		if h == other.AppendBlocks(nil, ids, len(ids))[0] {
			t.Fatalf("%v has one hash with two seeds", ids)
		}
	}
	for size := 1; size <= 67; size++ {
		ids := make([]uint32, size)
		add(ids)
		for i := range ids {
			for bit := range 32 {
				ids[i] = 1 << bit
				add(ids)
			}
			ids[i] = 0
		}
		for i := range ids {
			ids[i] = rand.Uint32N(200_000)
		}
		for i := 1; i < size; i++ {
			add(ids)
			ids[i-1], ids[i] = ids[i], ids[i-1]
		}
	}
}

// TestTokenHashOfBytes has the same ids in both forms, several blocks at once and one by one.
func TestTokenHashOfBytes(t *testing.T) {
	key := NewTokenHash(7)
	for _, size := range []int{1, 4, 15, 16, 17, 32, 63, 64, 100} {
		ids := make([]uint32, 5*size+size/2)
		var want []uint64
		var block []byte
		for i := range ids {
			ids[i] = rand.Uint32()
			if block = binary.LittleEndian.AppendUint32(block, ids[i]); len(block) == 4*size {
				want = append(want, key.Block(block))
				block = nil
			}
		}
		if got := key.AppendBlocks([]uint64{7}, ids, size); !slices.Equal(got[1:], want) || got[0] != 7 {
			t.Errorf("size %d: %x, want %x", size, got, want)
		}
	}
}

// BenchmarkTokenHash compares the hashes of 128 Ki tokens with XXH3, for several sizes of blocks.
func BenchmarkTokenHash(b *testing.B) {
	ids := make([]uint32, 128<<10)
	bytes := make([]byte, 4*len(ids))
	list := make([]uint64, 0, len(ids))
	key := NewTokenHash(7)
	for _, size := range []int{1, 16, 32, 64} {
		b.Run(fmt.Sprintf("fold/%d", size), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				list = key.AppendBlocks(list[:0], ids, size)
			}
		})
		b.Run(fmt.Sprintf("xxh3/%d", size), func(b *testing.B) {
			for b.Loop() {
				list = list[:0]
				for at := 0; at < len(bytes); at += 4 * size {
					list = append(list, xxh3.HashSeed(bytes[at:at+4*size], 7))
				}
			}
		})
	}
}
