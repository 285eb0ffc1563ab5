package exact

import (
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
)

// A timeline has, for each target and block of the universe, when it was held. Time is the
// number of the writer's operations.
type timeline struct {
	targets, chains, long int
	spans                 []([]heldSpan)
}

// heldSpan: surely held from after the operation from until the operation to begins.
type heldSpan struct{ from, to int64 }

func (l *timeline) of(target, chain, i int) *[]heldSpan {
	return &l.spans[(target*l.chains+chain)*l.long+i]
}

const always = 1 << 62

func (l *timeline) hold(target, chain, i int, now int64) {
	s := l.of(target, chain, i)
	if n := len(*s); n == 0 || (*s)[n-1].to != always {
		*s = append(*s, heldSpan{now, always})
	}
}

func (l *timeline) lose(target, chain, i int, now int64) {
	s := l.of(target, chain, i)
	if n := len(*s); n > 0 && (*s)[n-1].to == always {
		(*s)[n-1].to = now
	}
}

// sometime is whether the block may have been held at some moment of [from, to]; whole
// whether it was held all the time.
func (l *timeline) at(target, chain, i int, from, to int64) (sometime, whole bool) {
	for _, s := range *l.of(target, chain, i) {
		if s.from <= to+1 && s.to >= from {
			sometime = true
		}
		if s.from <= from && s.to > to {
			whole = true
		}
	}
	return sometime, whole
}

type answer struct {
	chain    int
	from, to int64
	depth    []int32
}

// TestReadersBesideWriter checks each answer of two readers against the times in which
// blocks were held. The chains share beginnings, so that runs divide and join.
func TestReadersBesideWriter(t *testing.T) {
	for _, targets := range []int{4, 100} {
		l := &timeline{targets: targets, chains: 12, long: 700}
		l.spans = make([][]heldSpan, targets*l.chains*l.long)
		chains, names := make([][]uint64, l.chains), make([][]uint64, l.chains)
		same := make([]int, l.chains) // blocks shared with chain 0
		for c := range chains {
			same[c] = c * 50
			chains[c] = append(append([]uint64{}, chainOf(0, l.long)[:same[c]]...), chainOf(uint64(c), l.long-same[c])...)
			names[c] = namesOf(1, chains[c])
		}
		same[0] = l.long
		x := New(1 << 30)
		var began, ended atomic.Int64
		var stop atomic.Bool
		var wait sync.WaitGroup
		answers := make([][]answer, 2)
		for reader := range answers {
			wait.Go(func() {
				rnd := rand.New(rand.NewPCG(9, uint64(reader)))
				var m Match
				last := int64(0)
				for !stop.Load() {
					if now := began.Load(); now == last || int64(len(answers[reader])*targets) > 3*now {
						x.Match(1, &m, chains[rnd.IntN(l.chains)]) // look all the time, keep some
						continue
					} else {
						last = now
					}
					a := answer{chain: rnd.IntN(l.chains)}
					a.from = ended.Load()
					x.Match(1, &m, chains[a.chain])
					a.to = began.Load()
					a.depth = append(a.depth, m.Depth[Device]...)
					answers[reader] = append(answers[reader], a)
				}
			})
		}
		write(x, l, chains, names, same, &began, &ended)
		stop.Store(true)
		wait.Wait()
		x.check(t)
		l.judge(t, answers)
	}
}

func write(x *Index, l *timeline, chains, names [][]uint64, same []int, began, ended *atomic.Int64) {
	rnd := rand.New(rand.NewPCG(1, uint64(l.targets)))
	steps := 4000
	if os.Getenv("KVROUTER_LONG") != "" {
		steps = 40_000
	}
	for range steps {
		now := began.Add(1)
		target, c := rnd.IntN(l.targets)*7%l.targets, rnd.IntN(l.chains)
		from := rnd.IntN(l.long)
		to := min(l.long, from+1+rnd.IntN(100))
		each := func(i int, f func(target, chain, i int, now int64)) {
			for other := range chains { // all chains that have this very block
				if other == c || i < same[c] && i < same[other] {
					f(target, other, i, now)
				}
			}
		}
		switch rnd.IntN(20) {
		default:
			s := &Stored{Target: target, Root: 1, Names: names[c][:to], Blocks: chains[c][:to]}
			for i := range to {
				each(i, l.hold)
			}
			if _, o := x.Store(s); o != OK {
				panic("outcome")
			}
			// As if there were no repeats: see below.
			x.mu.Lock()
			x.bytes.repeats -= int64(len(x.owners[target].repeats)) * repeatBytes
			x.owners[target].repeats = nil
			x.mu.Unlock()
		case 8, 9, 10, 11, 12, 13, 14, 15, 16, 17:
			for i := from; i < to; i++ {
				each(i, l.lose)
			}
			x.Remove(target, Device, names[c][from:to])
		case 18:
			if rnd.IntN(10) == 0 {
				for i := range l.chains * l.long {
					l.lose(target, i/l.long, i%l.long, now)
				}
				x.Clear(target)
			}
		case 19:
			x.Step(200)
		}
		ended.Store(now)
	}
}

func (l *timeline) judge(t *testing.T, answers [][]answer) {
	n := 0
	for _, of := range answers {
		for _, a := range of {
			for target, depth := range a.depth {
				n++
				whole := true
				for i := range l.long {
					some, all := l.at(target, a.chain, i, a.from, a.to)
					if i < int(depth) && !some {
						t.Fatalf("target %d, chain %d, from %d to %d: depth %d, but block %d was not held", target, a.chain, a.from, a.to, depth, i)
					}
					if whole = whole && all; whole && i >= int(depth) {
						t.Fatalf("target %d, chain %d, from %d to %d: depth %d, but block %d was held all the time", target, a.chain, a.from, a.to, depth, i)
					}
					if i >= int(depth) && !whole {
						break
					}
				}
			}
		}
	}
	t.Logf("%d answers", n)
}
