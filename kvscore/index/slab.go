package index

import "unsafe"

// page is the number of records in a page of a slab. At 256 both kinds of
// record fill one of Go's allocation sizes exactly.
const page = 256

// slab keeps records in pages and names them by number, so that links between
// them are nothing to scan for the garbage collector, and a pointer to a record
// stays good while others are added. Number 0 is never given out.
type slab[T any, P record[T]] struct {
	pages []*[page]T
	free  uint32 // first of the free records
	spare int    // how many there are
}

type record[T any] interface {
	*T
	link() *uint32 // the next free record
	live() bool
}

func (s *slab[T, P]) at(id uint32) P { return &s.pages[id/page][id%page] }

func (s *slab[T, P]) take() (uint32, P) {
	if s.free == 0 {
		s.pages = append(s.pages, new([page]T))
		s.relink(uint32(len(s.pages)-1) * page)
	}
	id := s.free
	p := s.at(id)
	s.free = *p.link()
	s.spare--
	*p.link() = 0
	return id, p
}

func (s *slab[T, P]) give(id uint32) {
	p := s.at(id)
	var zero T
	*p = zero
	*p.link() = s.free
	s.free = id
	s.spare++
}

// relink adds the free records from a number on to the empty free list, low
// numbers first.
func (s *slab[T, P]) relink(from uint32) {
	s.free, s.spare = 0, 0
	for id := uint32(len(s.pages) * page); id > max(from, 1); {
		id--
		if p := s.at(id); !p.live() {
			*p.link() = s.free
			s.free = id
			s.spare++
		}
	}
}

// count returns the number of records in use.
func (s *slab[T, P]) count() int {
	if len(s.pages) == 0 {
		return 0
	}
	return len(s.pages)*page - 1 - s.spare
}

func (s *slab[T, P]) pageBytes() int64 {
	var p [page]T
	return int64(unsafe.Sizeof(p)) + 16 // and its entry in pages, which append doubles
}

func (s *slab[T, P]) bytes() int64 { return int64(len(s.pages)) * s.pageBytes() }

// growth returns the bytes that n more records will add.
func (s *slab[T, P]) growth(n int) int64 {
	if n <= s.spare {
		return 0
	}
	return int64((n-s.spare+page)/page) * s.pageBytes() // one too many at times: record 0 is lost
}

// reclaimable returns what pack could free at best.
func (s *slab[T, P]) reclaimable() int64 { return int64(s.spare/page) * s.pageBytes() }

// pack moves records to low numbers, except those that must stay, and frees
// the pages at the end. It returns the new number of each old one.
func (s *slab[T, P]) pack(stays func(P) bool) []uint32 {
	top := uint32(len(s.pages) * page)
	moved := make([]uint32, top)
	last := uint32(s.count())
	high, to := uint32(0), uint32(1)
	for id := uint32(1); id < top; id++ {
		p := s.at(id)
		if !p.live() {
			continue
		}
		moved[id] = id
		if id > last && !stays(p) {
			for s.at(to).live() {
				to++
			}
			*s.at(to) = *p
			var zero T
			*p = zero
			moved[id] = to
		}
		high = max(high, moved[id])
	}
	keep := 0
	if high > 0 {
		keep = int(high/page) + 1
	}
	s.pages = append(make([]*[page]T, 0, keep), s.pages[:keep]...)
	s.relink(0)
	return moved
}
