package approx

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// model is the naive index: every block by the string of all up to it, per slot.
type model struct {
	slots    []modelSlot
	arrivals map[string]int
	clock    int
}

type modelSlot struct {
	capacity int64 // milli-tokens
	life     int
	blocks   map[string]*modelBlock
}

type modelBlock struct {
	refs      int
	touched   int
	confirmed bool
	lost      bool
	weight    int64
}

type modelRef struct {
	slot     int
	life     int
	prefixes []string
}

func newModel(slots int) *model {
	m := &model{arrivals: map[string]int{}}
	for range slots {
		m.slots = append(m.slots, modelSlot{blocks: map[string]*modelBlock{}})
	}
	return m
}

func prefixes(root uint64, blocks []uint64) []string {
	s := fmt.Sprint(root, ":")
	out := make([]string, len(blocks))
	for i, b := range blocks {
		s += string(rune('a' + b))
		out[i] = s
	}
	return out
}

func (s *modelSlot) used() (n, inUse int64) {
	for _, b := range s.blocks {
		if b.lost {
			continue
		}
		n += b.weight
		if b.refs > 0 {
			inUse += b.weight
		}
	}
	return n, inUse
}

// room evicts single blocks, the one touched longest ago first, if that makes
// room.
func (m *model) room(s *modelSlot, need int64) bool {
	if s.capacity == 0 {
		return true
	}
	used, inUse := s.used()
	if need > 0 && inUse+need > s.capacity {
		return false
	}
	for used+need > s.capacity {
		victim := ""
		for p, b := range s.blocks {
			if b.refs == 0 && (victim == "" || b.touched < s.blocks[victim].touched) {
				victim = p
			}
		}
		if victim == "" {
			return false
		}
		used -= s.blocks[victim].weight
		m.drop(s, victim)
	}
	return true
}

func (m *model) drop(s *modelSlot, p string) {
	delete(s.blocks, p)
	for i := range m.slots {
		if m.slots[i].blocks[p] != nil {
			return
		}
	}
	delete(m.arrivals, p)
}

func (m *model) matched(ps []string) (n int) {
	for i := range m.slots {
		k := 0
		for k < len(ps) && m.slots[i].blocks[ps[k]] != nil {
			k++
		}
		n = max(n, k)
	}
	return n
}

func (m *model) acquire(slot int, ps []string, weight int64, count bool) modelRef {
	end := m.matched(ps)
	s := &m.slots[slot]
	n := 0
	// Pin what is resident first: it is safe from making room for the rest.
	for n < len(ps) && s.blocks[ps[n]] != nil {
		b := s.blocks[ps[n]]
		b.refs++
		if b.lost {
			b.lost, b.confirmed = false, false
		}
		n++
	}
	for n < len(ps) && m.room(s, weight) {
		s.blocks[ps[n]] = &modelBlock{weight: weight, refs: 1}
		n++
	}
	m.room(s, 0) // what was lost counts again
	if count && end > 0 && n >= end {
		m.arrivals[ps[end-1]]++
	}
	return modelRef{slot, s.life, ps[:n]}
}

func (m *model) release(r modelRef, keep bool) {
	s := &m.slots[r.slot]
	for i := len(r.prefixes) - 1; i >= 0; i-- {
		b := s.blocks[r.prefixes[i]]
		b.refs--
		b.confirmed = b.confirmed || keep
		if b.refs == 0 && (!b.confirmed || b.lost) {
			m.drop(s, r.prefixes[i])
			continue
		}
		m.clock++
		b.touched = m.clock
	}
	m.room(s, 0)
}

func (m *model) clear(slot int) {
	s := &m.slots[slot]
	for p, b := range s.blocks {
		if b.refs == 0 {
			m.drop(s, p)
		}
		b.lost = true
	}
	s.life++
}

// forget drops what was touched before and is not in use.
func (m *model) forget(slot int, before int) {
	s := &m.slots[slot]
	for p, b := range s.blocks {
		if b.refs == 0 && b.touched < before {
			m.drop(s, p)
		}
	}
}

func (m *model) compare(t testing.TB, x *Index, root uint64, blocks []uint64, got *Match) {
	t.Helper()
	x.Match(&Chain{Root: root, Blocks: blocks}, got)
	ps := prefixes(root, blocks)
	end, shared, holders := m.matched(ps), 0, 0
	for n := 1; n <= end; n++ {
		if m.arrivals[ps[n-1]] >= minShared {
			shared = n
		}
	}
	for i := range m.slots {
		s := &m.slots[i]
		held, inUse := 0, 0
		for held < len(ps) && s.blocks[ps[held]] != nil && !s.blocks[ps[held]].lost {
			held++
		}
		for inUse < held && s.blocks[ps[inUse]].refs > 0 {
			inUse++
		}
		if shared > 0 && held >= shared {
			holders++
		}
		if int(got.Held[i]) != held || int(got.InUse[i]) != inUse {
			t.Fatalf("slot %d of %v: held %d want %d, in use %d want %d", i, ps, got.Held[i], held, got.InUse[i], inUse)
		}
	}
	arrivals := 0
	if end > 0 {
		arrivals = m.arrivals[ps[end-1]]
	}
	if got.Blocks != end || got.SharedHolders != holders || got.Arrivals != arrivals {
		t.Fatalf("%v: blocks %d want %d, shared by %d want %d, arrivals %d want %d", ps,
			got.Blocks, end, got.SharedHolders, holders, got.Arrivals, arrivals)
	}
}

func (m *model) compareSums(t testing.TB, x *Index) {
	t.Helper()
	all := map[string]bool{}
	for i := range m.slots {
		s := &m.slots[i]
		var inUse int64
		for p, b := range s.blocks {
			all[p] = true
			if b.refs > 0 {
				inUse += b.weight
			}
		}
		used, _ := s.used()
		if x.Used(i) != used/1000 || x.InUse(i) != inUse/1000 {
			t.Fatalf("slot %d: used %d want %d, in use %d want %d", i,
				x.Used(i), used/1000, x.InUse(i), inUse/1000)
		}
		if s.capacity > 0 && x.slots[i].used.Load() > max(s.capacity, inUse) {
			t.Fatalf("slot %d: used %d of %d", i, x.slots[i].used.Load(), s.capacity)
		}
	}
	if x.Blocks() != int64(len(all)) {
		t.Fatalf("blocks %d, want %d", x.Blocks(), len(all))
	}
}

// acquireAll is Acquire for a chain that is matched first.
func (x *Index) acquireAll(slot int, c *Chain) (Ref, int) {
	var m Match
	x.Match(c, &m)
	return x.Acquire(slot, c, m.Blocks)
}

// world runs the index and the model side by side. The operations come from
// next, which returns numbers below its argument.
type world struct {
	x     *Index
	m     *model
	refs  []Ref
	mrefs []modelRef
	next  func(n int) int
	times [8]struct { // some earlier ones, of the index and of the model
		index uint64
		model int
	}
	match Match
	slots int
	alpha int
	long  int
}

func newWorld(slots, alpha, long int, next func(int) int) *world {
	w := &world{x: New(1 << 30), m: newModel(slots + 1), next: next, slots: slots, alpha: alpha, long: long}
	for i := range slots + 1 {
		w.x.SetCapacity(i, 0)
	}
	return w
}

func (w *world) chain() (uint64, []uint64) {
	b := make([]uint64, w.next(w.long+1))
	for i := range b {
		b[i] = uint64(w.next(w.alpha))
	}
	return uint64(w.next(2)), b
}

// weight differs between roots but not for one prefix: the model's blocks have
// no runs whose weight they could take over.
func weight(root uint64) int64 { return 1000 + int64(root)*700 }

func (w *world) step(t testing.TB) {
	slot := w.next(w.slots)
	switch op := w.next(100); {
	case op < 45:
		root, b := w.chain()
		ref, n := w.x.acquireAll(slot, &Chain{Root: root, Blocks: b, Weights: Same(weight(root))})
		mref := w.m.acquire(slot, prefixes(root, b), weight(root), true)
		if n != len(mref.prefixes) || (n == 0) != (ref == Ref{}) {
			t.Fatalf("acquired %d of %d, want %d", n, len(b), len(mref.prefixes))
		}
		if n > 0 {
			w.refs, w.mrefs = append(w.refs, ref), append(w.mrefs, mref)
		}
	case op < 80:
		if len(w.refs) > 0 {
			w.release(w.next(len(w.refs)), w.next(3) > 0)
		}
	case op < 96:
		root, b := w.chain()
		w.x.Touch(slot, &Chain{Root: root, Blocks: b, Weights: Same(weight(root))}, 0, -1)
		w.m.release(w.m.acquire(slot, prefixes(root, b), weight(root), false), true)
	case op < 97:
		if slot < w.slots {
			w.x.Clear(slot)
			w.m.clear(slot)
		}
	case op < 98:
		at := w.times[w.next(len(w.times))]
		w.x.Forget(slot, at.index)
		w.m.forget(slot, at.model)
	default:
		tokens := int64(w.next(5 * w.long))
		w.x.SetCapacity(slot, tokens)
		w.m.slots[slot].capacity = tokens * 1000
		w.m.room(&w.m.slots[slot], 0)
	}
	for w.x.Step(100) {
	}
	at := &w.times[w.next(len(w.times))]
	at.index, at.model = w.x.Now()+1, w.m.clock+1
	root, b := w.chain()
	w.m.compare(t, w.x, root, b, &w.match)
}

func (w *world) release(i int, keep bool) {
	keep = keep && w.m.slots[w.mrefs[i].slot].life == w.mrefs[i].life
	w.x.Release(w.refs[i], keep)
	w.m.release(w.mrefs[i], keep)
	last := len(w.refs) - 1
	w.refs[i], w.mrefs[i] = w.refs[last], w.mrefs[last]
	w.refs, w.mrefs = w.refs[:last], w.mrefs[:last]
}

func (w *world) finish(t testing.TB) {
	for len(w.refs) > 0 {
		w.release(0, len(w.refs)%2 == 0)
	}
	w.m.compareSums(t, w.x)
	for i := range w.slots + 1 {
		w.x.Clear(i)
	}
	w.x.check(t)
	if w.x.Blocks() != 0 || len(w.x.runs) != 0 || w.x.Bytes() != 0 {
		t.Fatalf("left: %d blocks, %d runs, %d bytes", w.x.Blocks(), len(w.x.runs), w.x.Bytes())
	}
}

func TestIndexBehavesLikeModel(t *testing.T) {
	for _, c := range []struct{ slots, alpha, long, steps int }{
		{3, 2, 12, 70_000},
		{2, 1, 9, 50_000},
		{5, 3, 6, 60_000},
		{4, 2, 30, 16_000},
		{75, 2, 10, 5_000},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(uint64(c.slots), uint64(c.long)))
			w := newWorld(c.slots, c.alpha, c.long, rnd.IntN)
			for i := range c.steps {
				w.step(t)
				if i%40 == 0 {
					w.x.check(t)
				}
				if i%160 == 0 {
					w.m.compareSums(t, w.x)
				}
				for len(w.refs) > 6*c.slots {
					w.release(rnd.IntN(len(w.refs)), true)
				}
			}
			w.finish(t)
		})
	}
}
