package exact

import (
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// set is a set of targets that hold the same blocks. Readers see a set in the state in which
// a view shows it, or without targets that were cleared since: bits only go. No set means
// no target.
type set struct {
	word atomic.Uint64   // targets 0 to 63
	more []atomic.Uint64 // 64 targets each
	next *set            // with the same hash, shortened
	hash uint64
	refs int32 // segments
	n    int32 // targets
	dup  bool  // an equal set is there, since a target was cleared
}

// sets finds equal sets, so that they are kept once.
type sets struct {
	key     uint64
	buckets []*set
	count   int
	bytes   int64
}

func (s *set) empty() bool { return s == nil || s.n == 0 }

func (s *set) at(w int) uint64 {
	if w == 0 {
		return s.word.Load()
	}
	if w <= len(s.more) {
		return s.more[w-1].Load()
	}
	return 0
}

func (s *set) store(w int, v uint64) {
	if w == 0 {
		s.word.Store(v)
	} else {
		s.more[w-1].Store(v)
	}
}

func (s *set) has(target int) bool {
	return s != nil && s.at(target/64)&(1<<(target%64)) != 0
}

// each calls f with every target.
func (s *set) each(f func(target int)) {
	for w := range 1 + len(s.more) {
		for v := s.at(w); v != 0; v &= v - 1 {
			f(w*64 + bits.TrailingZeros64(v))
		}
	}
}

// of returns a target's part of the hash. The hash of a set is that of its targets, all
// joined by XOR.
func (s *sets) of(target int) uint64 {
	h := (uint64(target) + 1) * 0x9e3779b97f4a7c15
	h = (h ^ h>>30 ^ s.key) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// changed reports whether a is b with the target added or removed.
func changed(a, b *set, target int) bool {
	words := 1 + len(a.more)
	if b != nil {
		words = max(words, 1+len(b.more))
	}
	words = max(words, target/64+1)
	for w := range words {
		v := uint64(0)
		if b != nil {
			v = b.at(w)
		}
		if w == target/64 {
			v ^= 1 << (target % 64)
		}
		if a.at(w) != v {
			return false
		}
	}
	return true
}

// toggle returns the set with the target added, if it was not in it, or else without it.
func (s *sets) toggle(from *set, target int) *set {
	h, n := s.of(target), int32(1)
	if from != nil {
		h ^= from.hash
		if from.has(target) {
			n = from.n - 1
		} else {
			n = from.n + 1
		}
	}
	if n == 0 {
		return nil
	}
	if len(s.buckets) > 0 {
		for c := s.buckets[h&uint64(len(s.buckets)-1)]; c != nil; c = c.next {
			if c.hash == h && !c.dup && changed(c, from, target) {
				return c
			}
		}
	}
	return s.create(from, target, h, n)
}

func (s *sets) create(from *set, target int, hash uint64, n int32) *set {
	words := target/64 + 1
	if from != nil {
		words = max(words, 1+len(from.more))
	}
	c := &set{hash: hash, n: n}
	if words > 1 {
		c.more = make([]atomic.Uint64, words-1)
	}
	for w := range words {
		v := uint64(0)
		if from != nil {
			v = from.at(w)
		}
		if w == target/64 {
			v ^= 1 << (target % 64)
		}
		c.store(w, v)
	}
	if s.count >= len(s.buckets) {
		s.resize(max(8, 2*len(s.buckets)))
	}
	s.link(c)
	s.count++
	s.bytes += c.bytes()
	return c
}

func (s *set) bytes() int64 { return int64(unsafe.Sizeof(*s)) + int64(len(s.more))*8 }

func (s *sets) link(c *set) {
	b := &s.buckets[c.hash&uint64(len(s.buckets)-1)]
	c.next, *b = *b, c
}

func (s *sets) unlink(c *set) {
	p := &s.buckets[c.hash&uint64(len(s.buckets)-1)]
	for *p != c {
		p = &(*p).next
	}
	*p = c.next
	c.next = nil
}

func (s *sets) resize(n int) {
	old := s.buckets
	s.buckets = make([]*set, n)
	s.bytes += int64(n-len(old)) * 8
	for _, c := range old {
		for c != nil {
			next := c.next
			s.link(c)
			c = next
		}
	}
}

func (s *sets) keep(c *set) {
	if c != nil {
		c.refs++
	}
}

// release takes a segment's reference away, and drops a set that no segment has. Views that
// readers still use keep it as it is.
func (s *sets) release(c *set) {
	if c == nil {
		return
	}
	if c.refs--; c.refs > 0 {
		return
	}
	s.unlink(c)
	s.count--
	s.bytes -= c.bytes()
	if n := len(s.buckets); n > 8 && s.count*4 < n {
		s.resize(n / 2)
	}
}

// clear takes the target out of all sets. Its cost does not depend on the number of blocks.
func (s *sets) clear(target int) {
	w, bit, h := target/64, uint64(1)<<(target%64), s.of(target)
	var had *set // linked by next
	for i := range s.buckets {
		for p := &s.buckets[i]; *p != nil; {
			c := *p
			if c.at(w)&bit == 0 {
				p = &c.next
				continue
			}
			*p = c.next
			c.next, had = had, c
		}
	}
	for had != nil {
		c := had
		had = c.next
		c.store(w, c.at(w)&^bit)
		c.n--
		c.hash ^= h
		c.dup = c.n > 0 && s.canonical(c) != nil
		s.link(c)
	}
}

// canonical returns the set that stands for all equal ones, nil if there is none.
func (s *sets) canonical(like *set) *set {
	for c := s.buckets[like.hash&uint64(len(s.buckets)-1)]; c != nil; c = c.next {
		if c.hash == like.hash && !c.dup && equal(c, like) {
			return c
		}
	}
	return nil
}

func equal(a, b *set) bool {
	for w := range 1 + max(len(a.more), len(b.more)) {
		if a.at(w) != b.at(w) {
			return false
		}
	}
	return true
}
