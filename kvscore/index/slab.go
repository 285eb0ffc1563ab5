package index

import "unsafe"

// page is the number of records in a page of a slab. At 256 both kinds of
// record fill one of Go's allocation sizes exactly.
const page = 256

// slab keeps records in pages and names them by number, so that links between
// them are nothing to scan for the garbage collector, and a pointer to a record
// stays good while others are added. Number 0 is never given out.
//
// Pages are known by how full they are: new records go to the fullest, and an
// empty one is given back. Sparse ones can be emptied, see [Index.drain].
type slab[T any, P record[T]] struct {
	pages  []*[page]T // nil where there is none
	heads  []head     // of the pages
	lists  [classes]uint32
	vacant uint32 // first number without a page, plus 1; linked by next
	live   int    // pages
	spare  int    // free records
	kept   uint32 // an empty page, not to make one for each record; plus 1

	drained uint32 // the page being emptied, which takes no records; plus 1
}

// head says what is in a page. Numbers of pages and records in it are plus 1,
// so that 0 is none.
type head struct {
	next, prev uint32 // in the list of its class
	free       uint16 // first of the free records, which are linked
	used       uint16
	class      uint8
	stuck      bool // has records that could not move; page 0 always is
}

// Classes of pages: by used records in eighths, then some more.
const (
	full    = 8 + iota
	sticky  // stuck, and has room
	none    // not listed: stuck and full, or being drained
	classes = none
)

type record[T any] interface {
	*T
	link() *uint32 // the next free record
	live() bool
}

func (s *slab[T, P]) at(id uint32) P { return &s.pages[id/page][id%page] }

func (s *slab[T, P]) take() (uint32, P) {
	n := s.roomy()
	h := &s.heads[n]
	i := uint32(h.free - 1)
	p := P(&s.pages[n][i])
	h.free = uint16(*p.link())
	*p.link() = 0
	h.used++
	s.spare--
	if s.kept == n+1 {
		s.kept = 0
	}
	s.file(n)
	return n*page + i, p
}

func (s *slab[T, P]) give(id uint32) {
	n := id / page
	h := &s.heads[n]
	p := s.at(id)
	var zero T
	*p = zero
	*p.link() = uint32(h.free)
	h.free = uint16(id%page) + 1
	h.used--
	s.spare++
	switch {
	case n+1 == s.drained:
	case h.used == 0 && s.plenty():
		s.remove(n)
	case h.used == 0:
		s.kept = n + 1
		h.stuck = false
		s.file(n)
	default:
		s.file(n)
	}
	if k := s.kept; k != 0 && s.plenty() {
		s.remove(k - 1)
	}
}

// plenty reports whether an empty page is not needed soon.
func (s *slab[T, P]) plenty() bool { return s.spare >= page+page/4 }

// roomy returns a page with a free record, the fullest.
func (s *slab[T, P]) roomy() uint32 {
	if n := s.lists[sticky]; n != 0 {
		return n - 1
	}
	for c := full - 1; c >= 0; c-- {
		if n := s.lists[c]; n != 0 {
			return n - 1
		}
	}
	return s.add()
}

// file lists a page by how full it is.
func (s *slab[T, P]) file(n uint32) {
	h := &s.heads[n]
	class := uint8(h.used / (page / 8))
	switch {
	case h.stuck && class == full:
		class = none
	case h.stuck:
		class = sticky
	}
	if class == h.class {
		return
	}
	s.unlist(n)
	h.class = class
	if class == none {
		return
	}
	h.next = s.lists[class]
	if h.next != 0 {
		s.heads[h.next-1].prev = n + 1
	}
	s.lists[class] = n + 1
}

func (s *slab[T, P]) unlist(n uint32) {
	h := &s.heads[n]
	if h.class == none {
		return
	}
	if h.prev != 0 {
		s.heads[h.prev-1].next = h.next
	} else {
		s.lists[h.class] = h.next
	}
	if h.next != 0 {
		s.heads[h.next-1].prev = h.prev
	}
	h.next, h.prev, h.class = 0, 0, none
}

// add makes a page.
func (s *slab[T, P]) add() uint32 {
	n := s.vacant - 1
	if s.vacant != 0 {
		s.vacant = s.heads[n].next
	} else {
		n = uint32(len(s.pages))
		if len(s.pages) == cap(s.pages) { // append would double them
			c := s.grown()
			s.pages = append(make([]*[page]T, 0, c), s.pages...)
			s.heads = append(make([]head, 0, c), s.heads...)
		}
		s.pages, s.heads = append(s.pages, nil), append(s.heads, head{})
	}
	s.pages[n] = new([page]T)
	for i := range uint32(page - 1) {
		*P(&s.pages[n][i]).link() = i + 2
	}
	s.heads[n] = head{free: 1, class: none}
	s.live++
	s.spare += page
	if n == 0 { // record 0 is not given out, and the page stays
		s.heads[0].free, s.heads[0].used, s.heads[0].stuck = 2, 1, true
		s.spare--
	}
	s.file(n)
	return n
}

func (s *slab[T, P]) grown() int { return len(s.pages) + len(s.pages)/4 + 8 }

// remove gives an empty page back.
func (s *slab[T, P]) remove(n uint32) {
	s.unlist(n)
	if s.kept == n+1 {
		s.kept = 0
	}
	s.pages[n] = nil
	s.heads[n].next = s.vacant
	s.vacant = n + 1
	s.live--
	s.spare -= page
}

// reset gives all pages back; no record may be in use.
func (s *slab[T, P]) reset() { *s = slab[T, P]{} }

// count returns the number of records in use.
func (s *slab[T, P]) count() int {
	if s.live == 0 {
		return 0
	}
	return s.live*page - 1 - s.spare
}

func (s *slab[T, P]) pageBytes() int64 {
	var p [page]T
	return int64(unsafe.Sizeof(p))
}

// pageEntry is what each page number takes.
const pageEntry = int64(unsafe.Sizeof(uintptr(0)) + unsafe.Sizeof(head{}))

func (s *slab[T, P]) bytes() int64 {
	return int64(s.live)*s.pageBytes() + int64(cap(s.pages))*pageEntry
}

// growth returns the bytes that n more records will add, a page too many at
// times.
func (s *slab[T, P]) growth(n int) int64 {
	if n <= s.spare {
		return 0
	}
	more := (n - s.spare + page) / page
	b := int64(more) * s.pageBytes()
	if len(s.pages)+more > cap(s.pages) {
		b += int64(s.grown()+more-cap(s.pages)) * pageEntry
	}
	return b
}

// reclaimable returns what moving records together could free at best.
func (s *slab[T, P]) reclaimable() int64 { return int64(s.spare/page) * s.pageBytes() }

// sparse returns the page that is emptied with the fewest moves, if there is
// room elsewhere for what is in it.
func (s *slab[T, P]) sparse() (uint32, bool) {
	if s.spare < page {
		return 0, false
	}
	for c := range sticky {
		if n := s.lists[c]; n != 0 {
			return n - 1, true
		}
	}
	return 0, false
}

// unstick lets a page whose records could not move be tried again.
func (s *slab[T, P]) unstick() {
	n := s.lists[sticky]
	if n == 1 {
		n = s.heads[0].next
	}
	if n != 0 {
		s.heads[n-1].stuck = false
		s.file(n - 1)
	}
}
