package exact

// An edit changes who holds blocks of a run in one tier.
type edit struct {
	run    *run
	tier   Tier
	target int
	kind   kind
	n      int64 // blocks that changed for the target
}

type kind uint8

const (
	add kind = iota
	drop
	dropAll // for every target
)

// apply returns the set after the edit, for blocks from up to end.
func (x *Index) apply(e *edit, s *set, from, end int32) *set {
	n := int64(end - from)
	switch e.kind {
	case add:
		if s.has(e.target) {
			x.work.again = append(x.work.again, span{e.run.place(from), int32(n)})
			x.work.repeated += int(n)
			return s
		}
	case drop:
		if !s.has(e.target) {
			return s
		}
	case dropAll:
		if s != nil {
			s.each(func(target int) { x.owners[target].blocks[e.tier] -= n })
		}
		return nil
	}
	e.n += n
	return x.sets.toggle(s, e.target)
}

// edited returns the segments after an edit of blocks from up to, in the scratch space.
// Equal neighbours become one. It moves the segments' references to sets.
func (x *Index) edited(e *edit, old []segment, from, to int32) []segment {
	first := search(old, from)
	out := append(x.work.segments[:0], old[:first]...)
	pos, i := int32(0), first
	if first > 0 {
		pos = old[first-1].end
	}
	if pos < from {
		var s *set
		if i < len(old) {
			s = old[i].set
		}
		out = x.push(out, s, from)
		pos = from
	}
	for pos < to {
		var s *set
		end := to
		if i < len(old) {
			s, end = old[i].set, min(to, old[i].end)
		}
		out = x.push(out, x.apply(e, s, pos, end), end)
		pos = end
		if i < len(old) && old[i].end == end {
			i++
		}
	}
	if i < len(old) && (i == 0 || old[i-1].end < to) && old[i].end > to {
		out = x.push(out, old[i].set, old[i].end)
		i++
	}
	used := i
	if i < len(old) && len(out) > 0 && out[len(out)-1].set == old[i].set {
		out[len(out)-1].end = old[i].end
		used, i = i+1, i+1
	}
	out = append(out, old[i:]...)
	for _, s := range old[first:used] {
		x.sets.release(s.set)
	}
	return x.trimmed(out)
}

// push adds a segment with a reference to its set, or extends the last one.
func (x *Index) push(out []segment, s *set, end int32) []segment {
	if n := len(out); n > 0 && out[n-1].set == s {
		out[n-1].end = end
		return out
	}
	x.sets.keep(s)
	return append(out, segment{s, end})
}

// trimmed drops unheld blocks at the end, and keeps the scratch space.
func (x *Index) trimmed(out []segment) []segment {
	x.work.segments = out[:0]
	for n := len(out); n > 0 && out[n-1].set == nil; n = len(out) {
		out = out[:n-1]
	}
	return out
}

// part returns the segments of blocks from up to, with references.
func (x *Index) part(old []segment, from, to int32) []segment {
	out := x.work.segments[:0]
	for i := search(old, from); i < len(old) && (i == 0 || old[i-1].end < to); i++ {
		out = x.push(out, old[i].set, min(old[i].end, to)-from)
	}
	return x.trimmed(out)
}

func (x *Index) releaseAll(v *view) {
	for t := range Tier(Tiers) {
		for _, s := range v.tier(t) {
			x.sets.release(s.set)
		}
	}
}

// normalise replaces what a cleared target has left in a run. Empty sets go, equal ones
// become one, and blocks that nobody holds lose their names.
func (x *Index) normalise(r *run) {
	v := r.view.Load()
	if !v.lags() {
		return
	}
	for t := range Tier(Tiers) {
		old := v.tier(t)
		if len(old) == 0 {
			continue
		}
		out := x.work.segments[:0]
		for _, s := range old {
			out = x.push(out, x.sets.settled(s.set), s.end)
		}
		for _, s := range old {
			x.sets.release(s.set)
		}
		x.cover(r, v.hashes, t, x.trimmed(out))
	}
	x.forgetUnheld(r, 0, int32(len(v.hashes)))
}

// settled returns the set to use instead of one that a clear has changed.
func (s *sets) settled(c *set) *set {
	if c.empty() {
		return nil
	}
	if !c.dup {
		return c
	}
	if like := s.canonical(c); like != nil {
		return like
	}
	c.dup = false
	return c
}
