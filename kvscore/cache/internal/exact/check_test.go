package exact

import "testing"

// check verifies what must be true of the index between two calls.
func (x *Index) check(t testing.TB) {
	t.Helper()
	c := checker{t: t, x: x, blocks: make([][Tiers]int64, len(x.owners))}
	for id, r := range x.runs {
		if r != nil {
			if int(r.id) != id {
				t.Fatalf("run %d is at %d", r.id, id)
			}
			c.run(r)
		}
	}
	if n := len(x.runs) - 1 - len(x.freeRuns); c.runs != n || x.kids.Load().n != n {
		t.Fatalf("%d runs, counted %d, %d in the table", c.runs, n, x.kids.Load().n)
	}
	if c.bytes != x.memory.runs {
		t.Fatalf("runs take %d bytes, counted %d", c.bytes, x.memory.runs)
	}
	c.table()
	c.targets()
}

type checker struct {
	t       testing.TB
	x       *Index
	blocks  [][Tiers]int64
	runs    int
	named   int
	aliases int
	bytes   int64
}

func (c *checker) run(r *run) {
	x, v := c.x, r.view.Load()
	n := len(v.hashes)
	if n == 0 || n > runSize || len(r.names) != n || cap(r.names) != cap(v.hashes) || v.hashes[0] != r.first || int(r.high) < n {
		c.t.Fatalf("a run of %d blocks with %d names, capacities %d and %d, seen %d", n, len(r.names), cap(v.hashes), cap(r.names), r.high)
	}
	if x.kids.Load().find(r.up, r.after, r.root, r.first) != r {
		c.t.Fatal("a run is not found")
	}
	if up := r.up; up != nil && (up.kids[r.place] != r || up.root != r.root || int(r.after) > len(up.view.Load().hashes) || x.runs[up.id] != up) {
		c.t.Fatal("a run is not below another")
	}
	c.runs++
	c.bytes += runBytes + v.bytes() + storageBytes(v.hashes)
	columns := x.columns.Load()
	for t := range Tier(Tiers) {
		from := int32(0)
		var before set
		for i, s := range v.tier(t) {
			if s.end <= from || int(s.end) > n || i > 0 && s.equal(before) {
				c.t.Fatalf("segment %d of tier %d: %d to %d of %d", i, t, from, s.end, n)
			}
			s.each(columns.valid, func(column int) { c.blocks[columns.target[column]][t] += int64(s.end - from) })
			if !s.without(columns.valid).without(x.dirty).isZero() {
				c.t.Fatal("a set has a column of nobody")
			}
			from, before = s.end, s.set
		}
		if from > 0 && before.isZero() {
			c.t.Fatal("a segment without holders at the end")
		}
	}
	for i := range int32(n) {
		held, _ := v.held(i, i+1, columns.valid)
		if named := c.isNamed(r, i); held && !named || named && !held && x.dirty.isZero() {
			c.t.Fatalf("block %d: held %v, named %v", i, held, named)
		} else if named {
			c.named++
		}
	}
	if last := max(v.last(), r.deepest()); int(last) != n {
		c.t.Fatalf("a run of %d blocks, held and continued to %d", n, last)
	}
	for _, a := range r.aliases {
		c.aliases++
		if x.names.aliases[a.name] != r.at(a.i) || int(a.i) >= n {
			c.t.Fatal("an alias leads elsewhere")
		}
	}
}

func (c *checker) isNamed(r *run, i int32) bool {
	b, h := c.x.names.table.of(c.x.names.hash(r.names[i]))
	if b.count == 0 {
		return false
	}
	for k := b.search(h); b.has(k, h); k++ {
		if place(b.slots[k]&refMask) == r.at(i) {
			return true
		}
	}
	return false
}

func (c *checker) table() {
	t := &c.x.names.table
	count, slots := 0, 0
	for i := range t.shards {
		b := &t.shards[i]
		n, before := 0, uint64(0)
		for _, s := range b.slots {
			if s == 0 {
				continue
			}
			if n++; s>>refBits < before {
				c.t.Fatalf("shard %d is out of order", i)
			}
			before = s >> refBits
		}
		if n != b.count || len(b.slots) > 0 && b.slots[len(b.slots)-1] != 0 {
			c.t.Fatalf("shard %d: %d of %d slots, counted %d", i, n, len(b.slots), b.count)
		}
		count, slots = count+n, slots+len(b.slots)
	}
	if count != t.count || slots != t.slots || count != c.named || c.aliases != len(c.x.names.aliases) {
		c.t.Fatalf("names: %d, counted %d, named %d; slots %d, %d; aliases %d, %d",
			count, t.count, c.named, slots, t.slots, c.aliases, len(c.x.names.aliases))
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
			if r, i := c.x.find(at.at); r == nil || !setAt(r.view.Load().tier(at.tier), i).has(o.column) {
				c.t.Fatal("a repeat of a block that the target does not hold")
			}
		}
	}
	if int64(repeats)*repeatBytes != c.x.memory.repeats {
		c.t.Fatalf("%d repeats take %d bytes", repeats, c.x.memory.repeats)
	}
}
