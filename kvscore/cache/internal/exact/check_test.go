package exact

import "testing"

// check verifies what must be true of the index between two calls.
func (x *Index) check(t testing.TB) {
	t.Helper()
	c := checker{t: t, x: x, refs: map[*set]int32{}, aliases: map[uint32]int32{}}
	c.kids(x.top.Load(), nil)
	c.chunks()
	c.sets()
	c.names()
	if got := c.bytes + x.top.Load().bytes(); got != x.memory.runs {
		t.Fatalf("runs take %d bytes, counted %d", got, x.memory.runs)
	}
	c.targets()
}

type checker struct {
	t       testing.TB
	x       *Index
	refs    map[*set]int32
	aliases map[uint32]int32
	blocks  [MaxTargets][Tiers]int64
	runs    int
	held    int
	named   int
	bytes   int64
}

func (c *checker) kids(k *kids, owner *run) {
	n := 0
	k.each(func(key uint64, r *run) {
		n++
		if r.up.base() != k || r.up != k.part(key) {
			c.t.Fatal("a run is not below its kids")
		}
		want := keyOf(r.first)
		if owner == nil {
			want = topKey(r.root, r.first)
		} else if r.root != owner.root {
			c.t.Fatal("a run has another root")
		}
		if key != want || k.find(key, r.root, r.first) != r {
			c.t.Fatal("a run is not found")
		}
		c.run(r)
	})
	if n != k.n || k.owner != owner || k.whole != nil {
		c.t.Fatalf("%d kids, counted %d", n, k.n)
	}
}

func (c *checker) run(r *run) {
	v := r.view.Load()
	n := len(v.hashes)
	if n == 0 || n > chunkSize || len(r.names) != n || cap(r.names) != cap(v.hashes) || v.hashes[0] != r.first {
		c.t.Fatalf("a run of %d blocks with %d names, capacities %d and %d", n, len(r.names), cap(v.hashes), cap(r.names))
	}
	if int(r.high) < n || int(r.off)+n > int(c.x.chunks.get(r.chunk).high) {
		c.t.Fatalf("a run of %d blocks at %d, seen %d, chunk used to %d", n, r.off, r.high, c.x.chunks.get(r.chunk).high)
	}
	c.runs++
	c.bytes += runBytes + v.bytes() + storageBytes(v.hashes)
	lags := v.lags()
	for t := range Tier(Tiers) {
		from := int32(0)
		var before *set
		for i, s := range v.tier(t) {
			if s.end <= from || int(s.end) > n || i > 0 && s.set == before && !lags {
				c.t.Fatalf("segment %d of tier %d: %d to %d of %d", i, t, from, s.end, n)
			}
			if s.set != nil {
				c.refs[s.set]++
				s.set.each(func(target int) { c.blocks[target][t] += int64(s.end - from) })
			}
			from, before = s.end, s.set
		}
		if from > 0 && before == nil {
			c.t.Fatal("a segment without holders at the end")
		}
	}
	for i := range int32(n) {
		held, _ := v.held(i, i+1)
		hash := c.x.names.hash(r.names[i])
		named := c.x.names.table.of(hash).find(hash, uint64(r.place(i))) >= 0
		if held && !named || named && !held && !lags {
			c.t.Fatalf("block %d: held %v, named %v", i, held, named)
		}
		if held {
			c.held++
		}
		if named {
			c.named++
		}
		if got, at := c.x.chunks.at(r.place(i)); got != r || at != i {
			c.t.Fatal("a place leads elsewhere")
		}
	}
	if v.kids == nil {
		if int(v.last()) != n && !lags && c.x.sweep.dirty == c.x.sweep.clean {
			c.t.Fatalf("a run of %d blocks, held to %d", n, v.last())
		}
		return
	}
	c.bytes += v.kids.bytes()
	if v.kids.n == 0 {
		c.t.Fatal("empty kids")
	}
	c.kids(v.kids, r)
}

func (c *checker) chunks() {
	x := c.x
	for i := range x.names.aliases.count {
		a := x.names.aliases.at(i)
		c.aliases[uint32(a.place()>>offsetBits)]++
	}
	runs := 0
	for p, page := range x.chunks.pages {
		if page == nil {
			continue
		}
		used := 0
		for i := range page.chunks {
			k := &page.chunks[i]
			if k.high > 0 {
				used++
			}
			if k.high > 0 && k.idle() && p+i > 0 || k.high == 0 && !k.idle() {
				c.t.Fatal("a chunk is neither free nor used")
			}
			if k.aliases != c.aliases[uint32(p*chunkPage+i)] {
				c.t.Fatalf("a chunk with %d aliases, counted %d", c.aliases[uint32(p*chunkPage+i)], k.aliases)
			}
			runs += len(k.runs)
			end := int16(0)
			for _, r := range k.runs {
				if r.off < end || int(r.chunk) != p*chunkPage+i {
					c.t.Fatal("runs of a chunk overlap")
				}
				end = r.off + int16(len(r.names))
			}
		}
		if used != page.used || used == 0 {
			c.t.Fatalf("a page with %d chunks, counted %d", used, page.used)
		}
	}
	if runs != c.runs {
		c.t.Fatalf("%d runs, %d in chunks", c.runs, runs)
	}
}

func (c *checker) sets() {
	n, bytes := 0, int64(len(c.x.sets.buckets))*8
	for _, s := range c.x.sets.buckets {
		for ; s != nil; s = s.next {
			n++
			bytes += s.bytes()
			hash, targets := uint64(0), int32(0)
			s.each(func(target int) { hash ^= c.x.sets.of(target); targets++ })
			if s.refs != c.refs[s] || s.hash != hash || s.n != targets {
				c.t.Fatalf("a set of %d targets, counted %d, with %d references, counted %d", targets, s.n, c.refs[s], s.refs)
			}
			if like := c.x.sets.canonical(s); !s.dup && s.n > 0 && like != s {
				c.t.Fatal("two equal sets")
			}
		}
	}
	if n != c.x.sets.count || n != len(c.refs) || bytes != c.x.sets.bytes {
		c.t.Fatalf("%d sets, counted %d, used %d; %d bytes, counted %d", n, c.x.sets.count, len(c.refs), bytes, c.x.sets.bytes)
	}
}

func (c *checker) names() {
	tab := &c.x.names.table
	count, slots, deepest := 0, 0, 0
	seen := map[*bucket]bool{}
	for i, b := range tab.dir {
		if seen[b] {
			continue
		}
		seen[b] = true
		slots += len(b.slots)
		if b.depth == tab.depth {
			deepest++
		}
		n, before := 0, uint32(0)
		for k, s := range b.slots {
			if s == 0 {
				continue
			}
			n++
			hash := uint32(s >> refBits)
			if hash < before || b.find(hash, s&refMask) != k {
				c.t.Fatalf("bucket %d: slot %d is not found, or out of order", i, k)
			}
			before = hash
			if tab.dir[uint32(s>>refBits)>>(hashBits-tab.depth)] != b {
				c.t.Fatalf("bucket %d has a slot of another", i)
			}
		}
		if n != int(b.count) || b.slots[len(b.slots)-1] != 0 {
			c.t.Fatalf("bucket %d: %d of %d slots, counted %d", i, n, len(b.slots), b.count)
		}
		count += n
	}
	aliases := c.x.names.aliases.count
	if count != tab.count || slots != tab.slots || deepest != tab.deepest || count != c.named+aliases {
		c.t.Fatalf("names: %d counted %d; slots %d, %d; deepest %d, %d; named %d, aliases %d",
			count, tab.count, slots, tab.slots, deepest, tab.deepest, c.named, aliases)
	}
	for i := range aliases {
		hash := c.x.names.hash(c.x.names.aliases.at(i).name)
		if tab.of(hash).find(hash, aliasFlag|uint64(i)) < 0 {
			c.t.Fatal("an alias is not in the table")
		}
	}
}

func (c *checker) targets() {
	repeats := int64(0)
	for i := range c.x.owners {
		o := &c.x.owners[i]
		repeats += o.repeats.bytes()
		if o.blocks != c.blocks[i] {
			c.t.Fatalf("target %d: %v blocks, counted %v", i, c.blocks[i], o.blocks)
		}
		for _, s := range o.repeats.slots {
			if s == 0 {
				continue
			}
			key := s & repeatKeyMask
			r, at := c.x.chunks.at(place(key >> 2))
			if r == nil || !setAt(r.view.Load().tier(Tier(key&3)), at).has(i) {
				c.t.Fatalf("target %d: a repeat of a block that it does not hold", i)
			}
		}
	}
	if repeats != c.x.memory.repeats {
		c.t.Fatalf("repeats take %d bytes, counted %d", repeats, c.x.memory.repeats)
	}
}
