package engine

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// check fails the test unless the cache's books add up and what it holds is closed
// under prefixes. parents has the hash before each block, 0 before the first.
func (c *Cache) check(t *testing.T, parents map[uint64]uint64, private int) {
	t.Helper()
	linked, order := 0, map[uint64]int{}
	for i := c.nodes[0].next; i != 0; i = c.nodes[i].next {
		linked++
		order[c.nodes[i].hash] = linked
		if c.nodes[i].refs != 0 || c.nodes[c.nodes[i].next].prev != i {
			t.Fatalf("block %d in the ring has %d users", i, c.nodes[i].refs)
		}
	}
	inUse := 0
	for hash, i := range c.at {
		n := c.nodes[i]
		if n.hash != hash || n.refs < 0 {
			t.Fatalf("block %x has hash %x and %d users", hash, n.hash, n.refs)
		}
		if n.refs > 0 {
			inUse++
		} else if order[hash] == 0 {
			t.Fatalf("block %x has no users and is not in the ring", hash)
		}
		parent := parents[hash]
		if parent == 0 {
			continue
		}
		p, ok := c.at[parent]
		if !ok {
			t.Fatalf("block %x is held without the one before it", hash)
		}
		if n.refs > c.nodes[p].refs {
			t.Fatalf("block %x has %d users, the one before it %d", hash, n.refs, c.nodes[p].refs)
		}
		if c.nodes[p].refs == 0 && order[parent] < order[hash] {
			t.Fatalf("block %x would be evicted after the one before it", hash)
		}
	}
	if linked != c.unused || inUse+private != c.used || len(c.at) != inUse+linked {
		t.Fatalf("%d unused, %d in the ring; %d used, %d by hash and %d without; %d held", c.unused, linked, c.used, inUse, private, len(c.at))
	}
	if len(c.nodes)-1 != len(c.at)+len(c.spare) {
		t.Fatalf("%d nodes, %d held, %d spare", len(c.nodes)-1, len(c.at), len(c.spare))
	}
	if c.capacity > 0 && c.used+c.unused > c.capacity {
		t.Fatalf("%d used and %d unused blocks in a cache of %d", c.used, c.unused, c.capacity)
	}
}

// tree makes prompts that share prefixes at random.
type tree struct {
	r       *rand.Rand
	parents map[uint64]uint64
	chains  [][]uint64
	next    uint64
}

func newTree(seed uint64) *tree {
	return &tree{r: rand.New(rand.NewPCG(seed, 1)), parents: map[uint64]uint64{}}
}

func (tr *tree) block(parent uint64) uint64 {
	tr.next++
	tr.parents[tr.next] = parent
	return tr.next
}

func (tr *tree) job(n, block int) *Job {
	var chain []uint64
	if len(tr.chains) > 0 && tr.r.IntN(4) > 0 {
		old := tr.chains[tr.r.IntN(len(tr.chains))]
		chain = append(chain, old[:tr.r.IntN(len(old)+1)]...)
	}
	for range tr.r.IntN(6) {
		parent := uint64(0)
		if len(chain) > 0 {
			parent = chain[len(chain)-1]
		}
		chain = append(chain, tr.block(parent))
	}
	chain = chain[:min(len(chain), 20)]
	tr.chains = append(tr.chains, chain)
	j := &Job{Number: n, Chain: chain, In: max(1, len(chain)*block+tr.r.IntN(block)), Out: 1 + tr.r.IntN(60)}
	last, made := uint64(0), map[int]uint64{}
	if len(chain) > 0 {
		last = chain[len(chain)-1]
	}
	j.Answer = func(i int) uint64 {
		if made[i] == 0 {
			made[i] = tr.block(last)
			last = made[i]
		}
		return made[i]
	}
	return j
}

// private returns how many blocks without a hash the engine's jobs have.
func (e *Engine) private() (blocks int) {
	jobs := append(append([]*Job{}, e.decoding...), e.finishing...)
	if e.prefill != nil {
		jobs = append(jobs, e.prefill)
	}
	for _, j := range jobs {
		blocks += j.Blocks(e.block) - len(j.Chain)
	}
	return blocks
}

// mustWait fails the test if the first job in the queue could have been admitted.
func (e *Engine) mustWait(t *testing.T) {
	t.Helper()
	if e.Waiting() == 0 || e.line.ahead(e.queue[e.head].Number) {
		return
	}
	if j := e.queue[e.head]; e.prefill != nil {
		t.Fatal("idle with a prefill under way")
	} else if _, ok := e.cache.Reserve(j.Chain, j.Blocks(e.block)); ok {
		t.Fatalf("idle, but there is room for job %d", j.Number)
	}
}

func TestBlocksAreConservedAndPrefixesClosed(t *testing.T) {
	const block = 16
	for seed := range uint64(20) {
		tr := newTree(seed)
		capacity := 30 + tr.r.IntN(60)
		if seed == 0 {
			capacity = 0
		}
		c := NewCache(capacity)
		engines := []*Engine{New(Default(), c, nil, block)}
		if seed%2 > 0 { // two with one cache
			line := new(Line)
			engines = []*Engine{New(Default(), c, line, block), New(Default(), c, line, block)}
		}
		added, over := 0, 0
		stepping := make([]bool, len(engines))
		for range 3000 {
			i := tr.r.IntN(len(engines))
			e := engines[i]
			switch {
			case tr.r.IntN(3) == 0 && added < 400:
				e.Add(tr.job(added, block))
				added++
			case !stepping[i]:
				if _, stepping[i] = e.Begin(); !stepping[i] {
					e.mustWait(t)
				}
			default:
				_, done := e.End()
				over += len(done)
				stepping[i] = false
			}
			private := 0
			for _, e := range engines {
				private += e.private()
			}
			c.check(t, tr.parents, private)
		}
		for range 100_000 { // enough for all to end
			for i, e := range engines {
				if !stepping[i] {
					_, stepping[i] = e.Begin()
				}
				if stepping[i] {
					_, done := e.End()
					over += len(done)
					stepping[i] = false
				}
			}
			if over == added {
				break
			}
		}
		c.check(t, tr.parents, 0)
		if over != added || c.used != 0 {
			t.Fatalf("seed %d: %d of %d jobs are over, %d blocks in use", seed, over, added, c.used)
		}
	}
}

func TestEvictsTailsOfTheOldest(t *testing.T) {
	c := NewCache(6)
	for _, chain := range [][]uint64{{1, 2, 3}, {11, 12, 13}} {
		if held, ok := c.Reserve(chain, 3); held != 0 || !ok {
			t.Fatalf("held %d, %v", held, ok)
		}
		c.Release(chain, nil, 3)
	}
	c.Reserve([]uint64{21, 22}, 2)
	if a, b := c.Held([]uint64{1, 2, 3}), c.Held([]uint64{11, 12, 13}); a != 1 || b != 3 {
		t.Errorf("%d and %d blocks are left, want the head of the first and all of the second", a, b)
	}
	if _, ok := c.Reserve([]uint64{11, 12, 13}, 5); ok {
		t.Error("five blocks were reserved where two of six are in use")
	}
	if got := c.Usage(); got != 2.0/6 {
		t.Errorf("usage is %v", got)
	}
}

func unique(i int) uint64 { return 1<<40 + uint64(i) }

func TestStepTimes(t *testing.T) {
	e := New(Default(), NewCache(1000), nil, 16)
	e.SetSlow(2)
	chain := make([]uint64, 500)
	for i := range chain {
		chain[i] = uint64(i) + 1
	}
	e.Add(&Job{Chain: chain, In: 8000, Out: 2, Answer: unique})
	want := []float64{
		8 + 0.04*4096 + 1.5e-6*4096*2048,
		8 + 0.04*3904 + 1.5e-6*3904*(4096+1952),
		8 + 0.04 + 5e-5*8001,
	}
	for i, ms := range want {
		took, ok := e.Begin()
		if got := float64(took) / float64(time.Millisecond) / 2; !ok || math.Abs(got-ms) > 1e-3 {
			t.Errorf("step %d took %v ms, want %v", i, got, ms)
		}
		first, over := e.End()
		if (len(first) == 1) != (i == 1) || (len(over) == 1) != (i == 2) {
			t.Errorf("step %d: %d first tokens, %d jobs over", i, len(first), len(over))
		}
	}
	if e.context != 0 {
		t.Errorf("%d tokens of context are left", e.context)
	}
	if got, want := Default().PrefillMS(0, 8000), want[0]+want[1]; math.Abs(got-want) > 1e-6 {
		t.Errorf("PrefillMS is %v, want %v", got, want)
	}
}

func TestTheLastPromptBlockIsComputed(t *testing.T) {
	e := New(Default(), NewCache(100), nil, 16)
	chain := []uint64{1, 2, 3}
	for _, c := range []struct{ in, cached int }{{48, 0}, {48, 32}, {50, 48}} {
		j := &Job{Chain: chain, In: c.in, Out: 1, Answer: unique}
		e.Add(j)
		e.Begin()
		if _, over := e.End(); len(over) != 1 || j.Cached != c.cached {
			t.Errorf("%d prompt tokens: %d cached, want %d", c.in, j.Cached, c.cached)
		}
	}
}
