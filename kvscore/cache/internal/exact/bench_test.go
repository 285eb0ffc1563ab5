package exact

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
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

func unfeed(x *Index, target int, names []uint64, event int) {
	buf := make([]uint64, 0, event)
	for i := len(names); i > 0; i -= event {
		buf = buf[:0]
		for k := i - 1; k >= max(0, i-event); k-- {
			buf = append(buf, names[k])
		}
		if x.Remove(target, Device, buf) > 0 {
			panic("unknown")
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

// prompts stores some prompts in the form of a cell, and returns them.
func prompts(x *Index, form string, blocks, targets int) [][]uint64 {
	n := max(1, min(64, 500_000/(blocks*targets)))
	out := make([][]uint64, n)
	for p := range out {
		c := chainOf(uint64(p), blocks)
		names := namesOf(1, c)
		out[p] = c
		for t := range targets {
			end := blocks
			if form == "skewed" {
				end = max(1, blocks*(t+1)/targets)
			}
			feed(x, t, c[:end], names[:end], 64)
		}
		every := map[string]int{"every64": 64, "every16": 16}[form]
		for at := every; every > 0 && at < blocks; at += every {
			b := append(append([]uint64{}, c[:at]...), chainOf(uint64(at)<<20|uint64(p), 4)...)
			feed(x, at/every%targets, b, namesOf(1, b), 4096)
		}
	}
	return out
}

func BenchmarkMatch(b *testing.B) {
	for _, targets := range []int{8, 64, 512} {
		for _, form := range []string{"full", "skewed", "every64", "every16"} {
			for _, blocks := range []int{128, 512, 2048, 8192} {
				b.Run(fmt.Sprintf("%s/%dx%d", form, blocks, targets), func(b *testing.B) {
					x := New(1 << 40)
					fill(x, 500_000, targets)
					benchMatch(b, x, prompts(x, form, blocks, targets), targets)
				})
			}
		}
	}
	b.Run("miss/2048x64", func(b *testing.B) {
		x := New(1 << 40)
		fill(x, 500_000, 64)
		benchMatch(b, x, [][]uint64{chainOf(5, 2048)}, 64)
	})
}

// benchMatch also reports the least time of many short rounds, which leaves out what other
// processes on the machine take.
func benchMatch(b *testing.B, x *Index, asked [][]uint64, _ int) {
	var m Match
	runtime.GC()
	b.ReportAllocs()
	const round = 64
	best := time.Duration(1 << 62)
	for i := 0; b.Loop(); i += round {
		start := time.Now()
		for k := range round {
			x.Match(1, asked[(i+k)%len(asked)], &m)
		}
		best = min(best, time.Since(start))
	}
	b.ReportMetric(float64(best.Nanoseconds())/round, "least-ns")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/round, "mean-ns")
	b.ReportMetric(0, "ns/op")
}

// perBlock reports the best rate of several runs: by the thread's time, and by that of the
// process, which has the garbage collector in it.
func perBlock(b *testing.B, blocks int, prepare func() *Index, f func(x *Index)) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var thread, process float64
	for b.Loop() {
		x := prepare()
		runtime.GC()
		t, p := threadCPU(), processCPU()
		f(x)
		thread = max(thread, float64(blocks)/float64(threadCPU()-t)*1e3)
		process = max(process, float64(blocks)/float64(processCPU()-p)*1e3)
	}
	b.ReportMetric(thread, "Mblocks/s")
	b.ReportMetric(process, "Mblocks/s-with-GC")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkIngest stores 1,000,000 entries in chains of 1,024, and removes them tail first.
// The targets' engines take turns.
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
			full := func() *Index {
				x := empty()
				store(x)
				return x
			}
			remove := func(x *Index) {
				for i := range chains {
					for h := range holders {
						unfeed(x, (i+h)%8, names[i], event)
					}
				}
			}
			b.Run(fmt.Sprintf("store/%dper/on%d", event, holders), func(b *testing.B) {
				perBlock(b, chains*1024*holders, empty, store)
			})
			b.Run(fmt.Sprintf("remove/%dper/on%d", event, holders), func(b *testing.B) {
				perBlock(b, chains*1024*holders, full, remove)
			})
		}
	}
}

func BenchmarkClear(b *testing.B) {
	for _, c := range []struct{ long, foreign int }{{1000, 0}, {50, 0}, {1000, 1_000_000}, {50, 1_000_000}} {
		b.Run(fmt.Sprintf("chains%d/foreign%d", c.long, c.foreign), func(b *testing.B) {
			x := New(1 << 40)
			for i := range c.foreign / c.long {
				f := chainOf(uint64(1e9)+uint64(i), c.long)
				feed(x, 1+i%7, f, namesOf(1, f), 64)
			}
			var took, reclaim, most time.Duration
			n := 0
			for b.Loop() {
				for i := range 100_000 / c.long {
					f := chainOf(uint64(i), c.long)
					feed(x, 0, f, namesOf(1, f), 64)
				}
				start := time.Now()
				x.Clear(0)
				took += time.Since(start)
				for more := true; more; {
					start := time.Now()
					more = x.Step(1000)
					d := time.Since(start)
					reclaim += d
					most = max(most, d)
				}
				n++
			}
			b.ReportMetric(float64(took.Microseconds())/float64(n), "clear-µs")
			b.ReportMetric(float64(reclaim.Microseconds())/float64(n), "reclaim-µs")
			b.ReportMetric(float64(most.Microseconds()), "longest-step-µs")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func BenchmarkMemory(b *testing.B) {
	for _, c := range []struct {
		name                 string
		entries, long, event int
		holders              int
		seeds                bool
	}{
		{"1M/chains1024/on1", 1_000_000, 1024, 64, 1, false},
		{"1.4M/chains1024/on1", 1_400_000, 1024, 64, 1, false},
		{"1M/chains64/on1", 1_000_000, 64, 64, 1, false},
		{"1M/chains16/on1", 1_000_000, 16, 64, 1, false},
		{"1M/chains1024/1per/on1", 1_000_000, 1024, 1, 1, false},
		{"1M/chains1024/on8", 1_000_000, 1024, 64, 8, false},
		{"1M/chains1024/on64", 1_000_000, 1024, 64, 64, false},
		{"1M/chains1024/on8/seeds", 1_000_000, 1024, 64, 8, true},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				before := heap()
				x := New(1 << 40)
				n := 0
				for i := 0; n < c.entries; i++ {
					blocks := chainOf(uint64(i), c.long)
					for h := range c.holders {
						seed := uint64(1)
						if c.seeds {
							seed = uint64(h)
						}
						feed(x, (i+h)%max(8, c.holders), blocks, namesOf(seed, blocks), c.event)
						n += c.long
					}
				}
				b.ReportMetric(float64(heap()-before)/float64(n), "heap-B/entry")
				b.ReportMetric(float64(x.Bytes())/float64(n), "counted-B/entry")
				runtime.KeepAlive(x)
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkBesideWriter matches a prompt whose last 64 blocks a writer evicts and restores
// all the time.
func BenchmarkBesideWriter(b *testing.B) {
	for _, c := range []struct{ blocks, targets int }{{2048, 8}, {8192, 64}} {
		for _, busy := range []bool{false, true} {
			b.Run(fmt.Sprintf("%dx%d/writer=%v", c.blocks, c.targets, busy), func(b *testing.B) {
				x := New(1 << 40)
				fill(x, 500_000, c.targets)
				chain := chainOf(3, c.blocks)
				names := namesOf(1, chain)
				for t := range c.targets {
					feed(x, t, chain, names, 64)
				}
				var stop atomic.Bool
				var wrote atomic.Int64
				done := make(chan struct{})
				go func() {
					defer close(done)
					if !busy { // the second core is busy either way
						for i := uint64(0); !stop.Load(); i++ {
							_ = i * i
						}
						return
					}
					at := c.blocks - 64
					s := Stored{HasParent: true, Parent: names[at-1], Names: names[at:], Blocks: chain[at:]}
					for !stop.Load() {
						unfeed(x, 0, names[at:], 64)
						x.Store(&s)
						wrote.Add(128)
					}
				}()
				var m Match
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				n := 0
				start, cpu := time.Now(), threadCPU()
				for b.Loop() {
					x.Match(1, chain, &m)
					n++
				}
				took := time.Since(start)
				b.ReportMetric(float64(threadCPU()-cpu)/float64(n), "cpu-ns/op")
				stop.Store(true)
				<-done
				b.ReportMetric(float64(wrote.Load())/took.Seconds()/1e6, "Mblocks/s-written")
			})
		}
	}
}
