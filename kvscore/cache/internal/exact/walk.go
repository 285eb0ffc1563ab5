package exact

// Held is a block that a target holds, for [Index.Walk].
type Held struct {
	Target int
	Tier   Tier
	Root   uint64
	// Chain has the content hashes of all blocks up to this one. It is valid during the call.
	Chain []uint64
	// Name is one of the engines' names of the block, or the key of a target's own. Both are
	// good for [Index.Remove].
	Name uint64
}

// Walk calls f for every block that a target holds, in no particular order. No event is
// recorded meanwhile. f must not call the index.
func (x *Index) Walk(f func(Held)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.walkKids(x.top.Load(), nil, f)
}

func (x *Index) walkKids(k *kids, before []uint64, f func(Held)) {
	k.each(func(_ uint64, r *run) {
		v := r.view.Load()
		chain := append(before, v.hashes...)
		for t := range Tier(Tiers) {
			from := 0
			for _, s := range v.tier(t) {
				for b := from; b < int(s.end) && s.set != nil; b++ {
					s.set.each(func(target int) {
						f(Held{target, t, r.root, chain[:len(before)+b+1], r.names[b]})
					})
				}
				from = int(s.end)
			}
		}
		if v.kids != nil {
			x.walkKids(v.kids, chain, f)
		}
	})
}
