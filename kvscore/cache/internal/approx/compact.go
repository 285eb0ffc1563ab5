package approx

// maxMoved bounds the children of a run that can move: each needs the new number.
const maxMoved = 64

// drain empties a page of runs or of holds, as far as its records can move and the work
// allows. It reports whether there was such a page.
func (x *Index) drain() bool {
	if x.runs.reclaimable() > x.holds.reclaimable() {
		return drain(x, &x.runs, x.moveRun) || drain(x, &x.holds, x.moveHold)
	}
	return drain(x, &x.holds, x.moveHold) || drain(x, &x.runs, x.moveRun)
}

func drain[T any, P record[T]](x *Index, s *slab[T, P], move func(uint32) bool) bool {
	n, ok := s.sparse()
	if !ok {
		return false
	}
	s.unlist(n)
	s.drained = n + 1
	h := &s.heads[n]
	for i := uint32(0); i < page && h.used > 0 && x.left > 0; i++ {
		x.spend(1)
		if P(&s.pages[n][i]).live() && !move(n*page+i) {
			h.stuck = true
		}
	}
	s.drained = 0
	if h.used == 0 {
		s.remove(n)
	} else {
		s.file(n)
	}
	return true
}

// moveRun moves a run to another record. It does not move a run in use, because Refs name
// it, or a run with many children.
func (x *Index) moveRun(id uint32) bool {
	r := x.runs.at(id)
	for i := r.holds; i != 0; {
		h := x.holds.at(i)
		if h.refs > 0 {
			return false
		}
		i = h.next
		x.spend(1)
	}
	children := 0
	for i := r.child; i != 0; i = x.runs.at(i).next {
		if children++; children > maxMoved {
			return false
		}
	}
	x.spend(4 + 2*children)

	to, moved := x.runs.take()
	*moved = *r
	x.table.replace(x.keyHash(r), id, to)
	for i := r.holds; i != 0; {
		h := x.holds.at(i)
		h.run = to
		i = h.next
	}
	for i := r.child; i != 0; {
		c := x.runs.at(i)
		c.parent = to
		i = c.next
	}
	if r.prev != 0 {
		x.runs.at(r.prev).next = to
	} else if r.parent != 0 {
		x.runs.at(r.parent).child = to
	}
	if r.next != 0 {
		x.runs.at(r.next).prev = to
	}
	x.runs.give(id)
	return true
}

// moveHold moves a hold to another record.
func (x *Index) moveHold(id uint32) bool {
	h := x.holds.at(id)
	to, moved := x.holds.take()
	*moved = *h
	*x.holdLink(x.runs.at(h.run), id) = to
	l := x.listOf(h)
	if h.newer != 0 {
		x.holds.at(h.newer).older = to
	} else {
		l.front = to
	}
	if h.older != 0 {
		x.holds.at(h.older).newer = to
	} else {
		l.back = to
	}
	x.spend(4)
	x.holds.give(id)
	return true
}

// holdLink returns the link to a hold in its run's list.
func (x *Index) holdLink(r *run, id uint32) *uint32 {
	p := &r.holds
	for *p != id {
		p = &x.holds.at(*p).next
		x.spend(1)
	}
	return p
}

// adopt adds a run to its parent's children.
func (x *Index) adopt(id uint32) {
	r := x.runs.at(id)
	if r.parent == 0 {
		return
	}
	p := x.runs.at(r.parent)
	r.prev, r.next = 0, p.child
	if p.child != 0 {
		x.runs.at(p.child).prev = id
	}
	p.child = id
}

// orphan removes a run from its parent's children.
func (x *Index) orphan(id uint32) {
	r := x.runs.at(id)
	if r.prev != 0 {
		x.runs.at(r.prev).next = r.next
	} else if r.parent != 0 {
		x.runs.at(r.parent).child = r.next
	}
	if r.next != 0 {
		x.runs.at(r.next).prev = r.prev
	}
	r.prev, r.next = 0, 0
}
