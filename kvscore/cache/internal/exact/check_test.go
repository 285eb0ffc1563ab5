package exact

import "testing"

// check verifies what must be true of the index between two calls.
func (x *Index) check(t testing.TB) {
	t.Helper()
	c := checker{t: t, x: x, blocks: make([][Tiers]int64, len(x.owners)), refs: make([]int, len(x.sets.list)), kids: make(map[place]uint32)}
	for _, r := range x.runs {
		if r != nil {
			c.kids[r.up]++
		}
	}
	for id, r := range x.runs {
		if r != nil {
			if int(r.id) != id {
				t.Fatalf("run %d is at %d", r.id, id)
			}
			c.run(r)
		}
	}
	if n := len(x.runs) - 1 - len(x.free); c.runs != n || len(x.starts) != n {
		t.Fatalf("%d runs, counted %d, %d starts", c.runs, n, len(x.starts))
	}
	if c.bytes != x.bytes.blocks || c.aliased != len(x.aliases) {
		t.Fatalf("blocks of %d bytes, counted %d; %d with further names, %d", c.bytes, x.bytes.blocks, c.aliased, len(x.aliases))
	}
	c.names()
	c.sets()
	c.targets()
}

// distinct returns the number of blocks with names.
func (x *Index) distinct() (n int64) {
	for _, r := range x.runs[1:] {
		if r == nil {
			continue
		}
		for _, b := range r.blocks {
			if b.set != 0 {
				n++
			}
		}
	}
	return n
}

type checker struct {
	t       testing.TB
	x       *Index
	blocks  [][Tiers]int64
	refs    []int
	kids    map[place]uint32
	runs    int
	called  int
	aliased int
	bytes   int64
}

func (c *checker) run(r *run) {
	x, n := c.x, len(r.blocks)
	if n == 0 || n > runSize || x.starts[r.start()] != r {
		c.t.Fatalf("a run of %d blocks", n)
	}
	if r.up != 0 && (x.run(r.up) == nil || x.run(r.up).root != r.root || x.block(r.up).kids == 0) {
		c.t.Fatal("a run is not below another")
	}
	c.runs++
	c.bytes += r.bytes()
	if len(r.hashes) != n {
		c.t.Fatalf("%d blocks, %d hashes", n, len(r.hashes))
	}
	for i := range r.blocks {
		b, kids := &r.blocks[i], c.kids[r.at(i)]
		if b.kids != kids {
			c.t.Fatalf("%d runs continue a block, counted %d", kids, b.kids)
		}
		held := !x.sets.list[b.set].empty()
		if !held && b.set != 0 && !x.dirty && x.sweep == 0 || i == n-1 && !held && kids == 0 && !x.dirty && x.sweep == 0 {
			c.t.Fatal("a block of no target is left")
		}
		c.refs[b.set]++
		if b.set == 0 {
			continue
		}
		c.called += 1 + len(x.aliases[r.at(i)])
		if f := x.aliases[r.at(i)]; f != nil {
			c.aliased++
		}
		for _, name := range append([]uint64{b.name}, x.aliases[r.at(i)]...) {
			if x.names.get(name) != r.at(i) {
				c.t.Fatal("a name leads elsewhere")
			}
		}
		for tier, m := range x.sets.list[b.set].tier {
			m.each(func(target int) { c.blocks[target][tier]++ })
		}
	}
}

func (c *checker) names() {
	used, bytes := 0, int64(0)
	for i := range c.x.names.parts {
		p := &c.x.names.parts[i]
		used, bytes = used+len(p.of), bytes+nameBytes(p.added)
	}
	if used != c.called || bytes != c.x.names.bytes {
		c.t.Fatalf("%d names, counted %d; %d bytes, counted %d", used, c.called, bytes, c.x.names.bytes)
	}
}

func (c *checker) sets() {
	s := &c.x.sets
	for id := 1; id < len(s.list); id++ {
		f := &s.list[id]
		if f.refs != c.refs[id] || (f.key != "") != (s.ids[f.key] == uint32(id)) {
			c.t.Fatalf("a set has %d blocks, counted %d", c.refs[id], f.refs)
		}
	}
}

func (c *checker) targets() {
	repeats := 0
	for i := range c.x.owners {
		o := &c.x.owners[i]
		repeats += len(o.repeats)
		if o.blocks != c.blocks[i] {
			c.t.Fatalf("target %d: %v blocks, counted %v", i, c.blocks[i], o.blocks)
		}
		for at := range o.repeats {
			if r := c.x.run(at.at); r == nil || !c.x.sets.list[c.x.block(at.at).set].tier[at.tier].has(i) {
				c.t.Fatal("a repeat of a block that the target does not hold")
			}
		}
	}
	if int64(repeats)*repeatBytes != c.x.bytes.repeats {
		c.t.Fatalf("%d repeats take %d bytes", repeats, c.x.bytes.repeats)
	}
}
