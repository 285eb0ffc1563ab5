package exact

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
)

// The cells are those of the figures that the project compares with. The index has 1,000,000
// (block, target) entries in chains of 512 or 1,024. The prompts take turns.

func chainOf(seed uint64, n int) []uint64 {
	rnd := rand.New(rand.NewPCG(seed, 77))
	b := make([]uint64, n)
	for i := range b {
		b[i] = rnd.Uint64()
	}
	return b
}

// namesOf returns the names that an engine with a seed gives to a chain.
func namesOf(seed uint64, blocks []uint64) []uint64 {
	h := seed
	out := make([]uint64, len(blocks))
	for i, b := range blocks {
		h = (h ^ b) * 0x9e3779b97f4a7c15
		h ^= h >> 29
		out[i] = h
	}
	return out
}

// feed stores a chain in events of some blocks.
func feed(x *Index, target int, blocks, names []uint64, event int) {
	s := Stored{Target: target, Root: 1}
	for i := 0; i < len(blocks); i += event {
		end := min(i+event, len(blocks))
		s.Names, s.Blocks = names[i:end], blocks[i:end]
		if i > 0 {
			s.HasParent, s.Parent, s.Root = true, names[i-1], 0
		}
		if _, o := x.Store(&s); o != OK {
			panic(fmt.Sprint("outcome ", o))
		}
	}
}

func fill(x *Index, entries, targets int) {
	for i := 0; entries > 0; i++ {
		c := chainOf(uint64(1e9)+uint64(i), 512)
		feed(x, i%targets, c, namesOf(1, c), 64)
		entries -= 512
	}
}

// prompts stores some prompts, from which others branch off every so many blocks, and returns them.
func prompts(x *Index, every, blocks, targets int) [][]uint64 {
	n := max(1, min(64, 500_000/(blocks*targets)))
	out := make([][]uint64, n)
	for p := range out {
		c := chainOf(uint64(p), blocks)
		names := namesOf(1, c)
		out[p] = c
		for at := every; at < blocks; at += every { // before the prompt, which leaves each of them
			b := append(append([]uint64{}, c[:at]...), chainOf(uint64(at)<<20|uint64(p), 4)...)
			feed(x, at/every%targets, b, namesOf(1, b), 4096)
		}
		for t := range targets {
			feed(x, t, c, names, 64)
		}
	}
	return out
}

func BenchmarkMatch(b *testing.B) {
	const blocks = 8192
	for _, targets := range []int{8, 64, 512} {
		for _, every := range []int{blocks, 16} {
			b.Run(fmt.Sprintf("every%d/%d", every, targets), func(b *testing.B) {
				x := New(1 << 40)
				fill(x, 500_000, targets)
				benchMatch(b, x, prompts(x, every, blocks, targets))
			})
		}
	}
}

// benchMatch also reports the least time of many short rounds, which leaves out what other
// processes on the machine take.
func benchMatch(b *testing.B, x *Index, asked [][]uint64) {
	var m Match
	runtime.GC()
	b.ReportAllocs()
	const round = 64
	best := time.Duration(1 << 62)
	for i := 0; b.Loop(); i += round {
		start := time.Now()
		for k := range round {
			x.Match(1, &m, asked[(i+k)%len(asked)])
		}
		best = min(best, time.Since(start))
	}
	b.ReportMetric(float64(best.Nanoseconds())/round, "least-ns")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/round, "mean-ns")
	b.ReportMetric(0, "ns/op")
}

// perBlock reports the best rate of several runs.
func perBlock(b *testing.B, blocks int, prepare func() *Index, f func(x *Index)) {
	best := time.Duration(1 << 62)
	for b.Loop() {
		x := prepare()
		runtime.GC()
		start := time.Now()
		f(x)
		best = min(best, time.Since(start))
	}
	b.ReportMetric(float64(blocks)/float64(best)*1e3, "Mblocks/s")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkIngest stores 1,000,000 entries in chains of 1,024. The targets' engines take turns.
func BenchmarkIngest(b *testing.B) {
	for _, holders := range []int{1, 8} {
		for _, event := range []int{1, 8, 64} {
			chains := 1_000_000 / 1024 / holders
			blocks, names := make([][]uint64, chains), make([][]uint64, chains)
			for i := range chains {
				blocks[i] = chainOf(uint64(i), 1024)
				names[i] = namesOf(1, blocks[i])
			}
			empty := func() *Index { return New(1 << 40) }
			store := func(x *Index) {
				for i := range chains {
					for h := range holders {
						feed(x, (i+h)%8, blocks[i], names[i], event)
					}
				}
			}
			b.Run(fmt.Sprintf("store/%dper/on%d", event, holders), func(b *testing.B) {
				perBlock(b, chains*1024*holders, empty, store)
			})
		}
	}
}
