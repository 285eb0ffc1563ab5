package cache

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestTokenHash has the same ids in both forms, several blocks at once and one by one.
func TestTokenHash(t *testing.T) {
	for _, size := range []int{1, 4, 15, 16, 17, 32, 63, 64, 100} {
		ids := make([]uint32, 5*size+size/2)
		var want, other []uint64
		var block []byte
		for i := range ids {
			ids[i] = rand.Uint32()
			if block = binary.NativeEndian.AppendUint32(block, ids[i]); len(block) == 4*size {
				want, other = append(want, TokenHash(7).Block(block)), append(other, TokenHash(8).Block(block))
				block = nil
			}
		}
		if got := TokenHash(7).AppendBlocks([]uint64{7}, ids, size); !slices.Equal(got[1:], want) || got[0] != 7 {
			t.Errorf("size %d: %x, want %x", size, got, want)
		}
		if all := slices.Concat(want, other); len(slices.Compact(slices.Sorted(slices.Values(all)))) != len(all) {
			t.Errorf("size %d: equal hashes: %x", size, all)
		}
	}
	if got := TokenHash(7).AppendBlocks(nil, []uint32{1}, 0); got != nil {
		t.Errorf("%x for blocks of no size", got)
	}
}
