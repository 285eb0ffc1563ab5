package exact

import (
	"math/rand/v2"
	"testing"
)

// TestTableBehavesLikeMap also has hashes that keys cannot be expected to have: 0, the
// highest, and many that are equal or neighbours.
func TestTableBehavesLikeMap(t *testing.T) {
	const highest = 1<<hashBits - 1
	for name, hash := range map[string]func(r *rand.Rand) uint32{
		"uniform": func(r *rand.Rand) uint32 { return uint32(r.IntN(highest + 1)) },
		"first":   func(r *rand.Rand) uint32 { return uint32(r.IntN(8)) },
		"last":    func(r *rand.Rand) uint32 { return highest - uint32(r.IntN(8)) },
		"equal":   func(*rand.Rand) uint32 { return highest / 3 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(1, 1))
			var tab table
			tab.init()
			at := map[uint64]uint32{} // hash by reference
			var refs []uint64
			most := 60
			if name == "uniform" {
				most = 40_000
			}
			for round := range 6 {
				for len(refs) < most {
					ref := uint64(rnd.Int64N(refMask)) + 1
					if _, ok := at[ref]; ok {
						continue
					}
					at[ref] = hash(rnd)
					refs = append(refs, ref)
					tab.put(at[ref], ref)
				}
				tab.check(t, at)
				for n := most / 10 * round / 5; len(refs) > n; {
					i := rnd.IntN(len(refs))
					ref := refs[i]
					if !tab.drop(at[ref], ref) || tab.drop(at[ref], ref) {
						t.Fatal("a slot is not there, or twice")
					}
					delete(at, ref)
					refs[i] = refs[len(refs)-1]
					refs = refs[:len(refs)-1]
				}
				tab.check(t, at)
			}
		})
	}
}

func (t *table) check(tb testing.TB, want map[uint64]uint32) {
	tb.Helper()
	slots, seen := 0, map[*bucket]bool{}
	for _, b := range t.dir {
		if !seen[b] {
			seen[b] = true
			slots += len(b.slots)
		}
	}
	if t.count != len(want) || t.slots != slots {
		tb.Fatalf("%d slots of %d, want %d of %d", t.count, t.slots, len(want), slots)
	}
	for ref, hash := range want {
		if t.of(hash).find(hash, ref) < 0 {
			tb.Fatalf("hash %x is not found", hash)
		}
	}
}
