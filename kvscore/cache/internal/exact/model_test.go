package exact

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
)

// chainKey stands for a root and blocks.
type chainKey uint64

// model is the plain index: maps of blocks by their chain.
type model struct {
	x         *Index // asked about names of blocks that were empty in between
	blocks    map[chainKey]*modelBlock
	names     map[uint64]modelName
	sharing   map[int]bool
	ambiguous map[int]bool
	refused   map[int]bool
}

type modelBlock struct {
	root    uint64
	emptied int // how often the last holder has gone
	held    map[holder]int
}

type holder struct {
	target int
	tier   Tier
}

type modelName struct {
	chain   chainKey
	emptied int
}

func newModel(x *Index) *model {
	return &model{
		x: x, blocks: map[chainKey]*modelBlock{}, names: map[uint64]modelName{},
		sharing: map[int]bool{}, ambiguous: map[int]bool{}, refused: map[int]bool{},
	}
}

func (m *model) block(chain chainKey, root uint64) *modelBlock {
	b := m.blocks[chain]
	if b == nil {
		b = &modelBlock{root: root, held: map[holder]int{}}
		m.blocks[chain] = b
	}
	return b
}

// known returns the held block of a name. The index may or may not know a name from before the
// block was empty: it decides.
func (m *model) known(name uint64) (chainKey, *modelBlock) {
	n, ok := m.names[name]
	if !ok {
		return 0, nil
	}
	b := m.blocks[n.chain]
	if len(b.held) == 0 {
		return 0, nil
	}
	if n.emptied != b.emptied {
		if _, b := m.x.known(name); b == nil {
			return 0, nil
		}
	}
	return n.chain, b
}

// claim gives a block a name. It returns false if it is that of another block.
func (m *model) claim(name uint64, chain chainKey) bool {
	if other, b := m.known(name); b != nil && other != chain {
		return false
	}
	m.names[name] = modelName{chain, m.blocks[chain].emptied}
	return true
}

func (b *modelBlock) heldBy(target int) bool {
	for h := range b.held {
		if h.target == target {
			return true
		}
	}
	return false
}

func link(chain chainKey, root, block uint64) chainKey {
	if chain == 0 {
		chain = chainKey(root) * 0x9e3779b97f4a7c15
	}
	chain = (chain ^ chainKey(block+1)) * 0xd6e8feb86659fd93
	return chain ^ chain>>32
}

func (m *model) store(s *Stored) (n int, o Outcome) {
	h := holder{s.Target, s.Tier}
	var again []*modelBlock
	n, o = m.lay(s, h, &again)
	repeats := s.HasParent || len(s.Names) == 1 && !m.refused[s.Target] || len(again) < len(s.Names) && o == OK && !m.refused[s.Target]
	if repeats {
		for _, b := range again {
			if s.Tier != Shared {
				b.held[h]++
			}
		}
	}
	if s.Tier == Shared && n > 0 {
		m.sharing[s.Target] = true
	}
	m.ambiguous[s.Target] = m.ambiguous[s.Target] || o == Contradiction
	m.refused[s.Target] = m.refused[s.Target] || o != OK
	return n, o
}

func (m *model) lay(s *Stored, h holder, again *[]*modelBlock) (n int, o Outcome) {
	hold := func(b *modelBlock) {
		if b.held[h] > 0 {
			*again = append(*again, b)
		} else {
			b.held[h] = 1
		}
	}
	chain, root := chainKey(0), s.Root
	if s.Blocks == nil {
		for _, name := range s.Names {
			if _, b := m.known(name); b != nil && (!m.ambiguous[s.Target] || b.heldBy(s.Target)) {
				hold(b)
				n++
			} else {
				o = UnknownName
			}
		}
		return n, o
	}
	if s.HasParent {
		var b *modelBlock
		chain, b = m.known(s.Parent)
		if b == nil || !b.heldBy(s.Target) && (s.Root != 0 && s.Root != b.root || m.ambiguous[s.Target]) {
			return 0, UnknownParent
		}
		if s.Root == 0 && m.ambiguous[s.Target] || s.Root != 0 && s.Root != b.root {
			return 0, Contradiction
		}
		root = b.root
	}
	for i, name := range s.Names {
		chain = link(chain, root, s.Blocks[i])
		b := m.block(chain, root)
		if !m.claim(name, chain) {
			return n, Contradiction
		}
		hold(b)
		n++
	}
	return n, OK
}

func (m *model) remove(target int, t Tier, names []uint64) (unknown int) {
	for _, name := range names {
		_, b := m.known(name)
		h := holder{target, t}
		switch {
		case b == nil:
			unknown++
		case t == Shared:
			before := len(b.held)
			for o := range b.held {
				if o.tier == Shared {
					delete(b.held, o)
				}
			}
			if len(b.held) == before {
				unknown++
			}
			b.note()
		case b.held[h] == 0:
			unknown++
		default:
			if b.held[h]--; b.held[h] == 0 {
				delete(b.held, h)
				b.note()
			}
		}
	}
	return unknown
}

func (b *modelBlock) note() {
	if len(b.held) == 0 {
		b.emptied++
	}
}

func (m *model) clear(target int) {
	for _, b := range m.blocks {
		had := len(b.held)
		for h := range b.held {
			if h.target == target {
				delete(b.held, h)
			}
		}
		if had > 0 {
			b.note()
		}
	}
	delete(m.sharing, target)
	delete(m.ambiguous, target)
	delete(m.refused, target)
}

// depths returns the truth for a chain.
func (m *model) depths(target int, root uint64, blocks []uint64) (depth [Tiers]int32) {
	var ended [Tiers]bool
	chain := chainKey(0)
	for _, block := range blocks {
		chain = link(chain, root, block)
		b := m.blocks[chain]
		if b == nil {
			break
		}
		held := false
		for t := range Tier(Tiers) {
			held = held || b.held[holder{target, t}] > 0
			if t == Shared && m.sharing[target] {
				for h := range b.held {
					held = held || h.tier == Shared
				}
			}
			ended[t] = ended[t] || !held
			if !ended[t] {
				depth[t]++
			}
		}
	}
	return depth
}

var worlds = []struct {
	worldSize
	steps int
}{
	{worldSize{targets: 3, tiers: 1, alpha: 2, long: 12, seeds: 1, spread: 1}, 270_000},
	{worldSize{targets: 3, tiers: 4, alpha: 2, long: 10, seeds: 2, spread: 1}, 250_000},
	{worldSize{targets: 5, tiers: 2, alpha: 3, long: 6, seeds: 3, spread: 1}, 250_000},
	{worldSize{targets: 4, tiers: 4, alpha: 2, long: 8, seeds: 4, spread: 40}, 150_000},
	{worldSize{targets: 70, tiers: 1, alpha: 2, long: 9, seeds: 2, spread: 1}, 60_000},
	{worldSize{targets: 60, tiers: 3, alpha: 2, long: 9, seeds: 3, spread: 68}, 20_000},
	{worldSize{targets: 2, tiers: 1, alpha: 1, long: 1300, seeds: 1, spread: 1}, 4_000},
	{worldSize{targets: 3, tiers: 2, alpha: 90, long: 700, seeds: 2, spread: 1}, 4_000},
}

// TestIndexBehavesLikeModel makes 200,000 random operations, or 4,000,000 with
// KVROUTER_LONG=1.
func TestIndexBehavesLikeModel(t *testing.T) {
	seeds, share := uint64(1), 5
	if os.Getenv("KVROUTER_LONG") != "" {
		seeds, share = 4, 1
	}
	for seed := range seeds {
		for _, c := range worlds {
			t.Run(fmt.Sprintf("%d/%+v", seed, c.worldSize), func(t *testing.T) {
				t.Parallel()
				steps := c.steps / share
				if testing.Short() {
					steps /= 4
				}
				rnd := rand.New(rand.NewPCG(seed, uint64(c.long)))
				w := newWorld(c.worldSize, rnd.IntN)
				for i := range steps {
					w.step(t)
					if i%200 == 0 {
						w.x.check(t)
						w.compareAll(t)
					}
				}
				w.finish(t)
			})
		}
	}
}
