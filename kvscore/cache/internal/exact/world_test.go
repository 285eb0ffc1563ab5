package exact

import (
	"maps"
	"slices"
	"testing"
)

// world runs the index and the model side by side. The operations come from next, which
// returns numbers below its argument.
type world struct {
	x     *Index
	m     *model
	next  func(n int) int
	names map[nameKey]uint64
	known []uint64 // some names that were used
	match Match
	c     worldSize
}

// nameKey is what an engine's name of a block depends on.
type nameKey struct {
	seed  int
	chain chainKey
}

type worldSize struct {
	targets, tiers, alpha, long, seeds, spread int
}

func newWorld(c worldSize, next func(int) int) *world {
	w := &world{x: New(1 << 30), next: next, names: map[nameKey]uint64{}, c: c}
	w.m = newModel(w.x)
	return w
}

func (w *world) chain() (uint64, []uint64) {
	b := make([]uint64, w.next(w.c.long+1))
	long := w.next(3) == 0
	for i := range b {
		if long {
			b[i] = uint64(i % w.c.alpha)
		} else {
			b[i] = uint64(w.next(w.c.alpha))
		}
	}
	return uint64(1 + w.next(2)), b
}

// name returns how the target's engine calls the last block of a chain. Seed 0 forgets the
// root, as SGLang does the salt.
func (w *world) name(target int, root uint64, blocks []uint64) uint64 {
	seed := target % w.c.seeds
	if w.c.seeds > 2 && seed == 0 {
		root = 0
	}
	key := nameKey{seed: seed}
	for _, b := range blocks {
		key.chain = link(key.chain, root+1, b)
	}
	if w.names[key] == 0 {
		w.names[key] = uint64(len(w.names)+1) * 0x9e3779b97f4a7c15
	}
	return w.names[key]
}

func (w *world) target() int { return w.next(w.c.targets) * w.c.spread }

func (w *world) step(t testing.TB) {
	target, tier := w.target(), Tier(w.next(w.c.tiers))
	root, blocks := w.chain()
	switch op := w.next(100); {
	case op < 45 && len(blocks) > 0:
		w.store(t, target, tier, root, blocks)
	case op < 80 && len(blocks) > 0:
		from := w.next(len(blocks))
		var names []uint64
		for i := from; i < len(blocks) && w.next(8) > 0; i++ {
			names = append(names, w.name(target, root, blocks[:i+1]))
		}
		if w.next(2) == 0 {
			slices.Reverse(names)
		}
		if w.next(10) == 0 && len(names) > 0 {
			names = append(names, names[w.next(len(names))])
		}
		want := w.m.remove(target, tier, names)
		if got := w.x.Remove(target, tier, names); got != want {
			t.Fatalf("removed %d names of target %d: %d unknown, want %d", len(names), target, got, want)
		}
	case op < 82:
		w.x.Clear(target)
		w.m.clear(target)
	case op < 90:
		w.x.Step(w.next(60))
	}
	w.compare(t)
}

func (w *world) store(t testing.TB, target int, tier Tier, root uint64, blocks []uint64) {
	from := w.next(len(blocks))
	if w.next(2) == 0 {
		from = 0
	}
	s := &Stored{Target: target, Tier: tier, Root: root, Blocks: blocks[from:]}
	for i := range blocks[from:] {
		s.Names = append(s.Names, w.name(target, root, blocks[:from+i+1]))
	}
	if from > 0 {
		s.HasParent, s.Parent = true, w.name(target, root, blocks[:from])
		if w.next(2) == 0 {
			s.Root = 0
		}
	}
	switch w.next(30) {
	case 0:
		s.Names[w.next(len(s.Names))] = s.Names[0]
	case 1:
		s.Names[w.next(len(s.Names))] = w.known1(s.Names[0])
	case 2, 3, 4:
		s.Blocks, s.HasParent = nil, false
	}
	w.known = append(w.known, s.Names...)
	if len(w.known) > 500 {
		w.known = w.known[250:]
	}
	wn, wo := w.m.store(s)
	n, o := w.x.Store(s)
	if n != wn || o != wo {
		t.Fatalf("stored %+v: %d blocks, outcome %d, want %d and %d", s, n, o, wn, wo)
	}
}

func (w *world) known1(other uint64) uint64 {
	if len(w.known) == 0 {
		return other
	}
	return w.known[w.next(len(w.known))]
}

func (w *world) compare(t testing.TB) {
	t.Helper()
	root, blocks := w.chain()
	w.x.Match(root, &w.match, blocks[:len(blocks)/3], blocks[len(blocks)/3:])
	for i := range w.c.targets {
		target := i * w.c.spread
		want := w.m.depths(target, root, blocks)
		var got [Tiers]int32
		for tier := range got {
			if target < len(w.match.Depth[tier]) {
				got[tier] = w.match.Depth[tier][target]
			}
		}
		if got != want {
			t.Fatalf("target %d of %d:%v: depths %v, want %v", target, root, blocks, got, want)
		}
	}
	for tier := range w.match.Depth {
		for target, d := range w.match.Depth[tier] {
			if d != 0 && target%w.c.spread != 0 {
				t.Fatalf("target %d holds %d blocks of nothing", target, d)
			}
		}
	}
}

// compareAll compares how much is held.
func (w *world) compareAll(t testing.TB) {
	t.Helper()
	counts := map[holder]int64{}
	distinct := int64(0)
	for _, b := range w.m.blocks {
		for h := range b.held {
			counts[h]++
		}
		if len(b.held) > 0 {
			distinct++
		}
	}
	if w.x.distinct() != distinct && !w.x.Step(0) {
		t.Fatalf("%d distinct blocks are held, want %d", w.x.distinct(), distinct)
	}
	for i := range w.c.targets {
		target := i * w.c.spread
		for tier := range Tier(Tiers) {
			if got, want := w.x.Blocks(target, tier), counts[holder{target, tier}]; got != want {
				t.Fatalf("target %d has %d blocks in tier %d, want %d", target, got, tier, want)
			}
		}
		if got, want := w.x.Incomplete(target), w.m.refused[target]; got != want {
			t.Fatalf("target %d: incomplete is %v, want %v", target, got, want)
		}
	}
}

// finish removes everything, and expects that nothing is left.
func (w *world) finish(t testing.TB) {
	if w.next(2) == 0 {
		for i := range w.c.targets {
			w.x.Clear(i * w.c.spread)
		}
	} else {
		w.removeAll()
	}
	w.x.check(t)
	for w.x.Step(100) {
	}
	w.x.check(t)
	if w.x.distinct() != 0 || w.x.Bytes() > 40<<10+int64(cap(w.x.owners))*100 {
		t.Fatalf("left: %d blocks, %d bytes", w.x.distinct(), w.x.Bytes())
	}
}

func (w *world) removeAll() {
	names := slices.Collect(maps.Values(w.names))
	for i := range w.c.targets {
		target := i * w.c.spread
		for tier := range Tier(Tiers) {
			for range 50 { // repeats
				if w.x.Remove(target, tier, names) == len(names) {
					break
				}
			}
		}
		w.x.Clear(target) // more repeats than that
	}
}
