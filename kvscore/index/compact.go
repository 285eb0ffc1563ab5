package index

func (x *Index) reclaimable() int64 {
	return x.runs.reclaimable() + x.holds.reclaimable()
}

// compact moves runs and holds together and frees the pages left over. Runs in
// use stay where they are, for Refs name them.
func (x *Index) compact() {
	runs := x.runs.pack(func(r *run) bool {
		for i := r.holds; i != 0; {
			h := x.holds.at(i)
			if h.refs > 0 {
				return true
			}
			i = h.next
		}
		return false
	})
	holds := x.holds.pack(func(*hold) bool { return false })
	x.table.clear()
	for id := uint32(1); int(id) < len(x.runs.pages)*page; id++ {
		r := x.runs.at(id)
		if !r.live() {
			continue
		}
		if r.parent != 0 {
			r.parent = runs[r.parent]
		}
		r.holds = holds[r.holds]
		x.table.put(x.keyHash(r), id)
	}
	for id := uint32(1); int(id) < len(x.holds.pages)*page; id++ {
		h := x.holds.at(id)
		if !h.live() {
			continue
		}
		h.run = runs[h.run]
		h.next, h.newer, h.older = holds[h.next], holds[h.newer], holds[h.older]
	}
	for i := range x.slots {
		for _, l := range []*list{&x.slots[i].lru, &x.slots[i].parked} {
			if l.front != 0 {
				l.front, l.back = holds[l.front], holds[l.back]
			}
		}
	}
	x.stuck, x.stuckRefs = x.reclaimable(), x.refs
}
