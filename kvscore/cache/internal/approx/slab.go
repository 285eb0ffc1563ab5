package approx

import "unsafe"

// page is the number of records in a page of a slab. At 256 both kinds of
// record fill one of Go's allocation sizes exactly.
const page = 256

// slab keeps records in pages and names them by number. The garbage collector need not scan
// links between records, and a pointer to a record stays valid while others are added. No
// record has the number 0.
//
// Lists sort the pages by their used records. New records go to the fullest page, and an
// empty page is freed. Sparse pages can be emptied: see [Index.drain].
type slab[T any, P record[T]] struct {
	pages  []*[page]T // nil if there is none
	heads  []head     // of the pages
	lists  [classes]uint32
	vacant uint32 // first number without a page, plus 1; linked by next
	live   int    // pages
	spare  int    // free records
	kept   uint32 // an empty page kept for the next record; plus 1

	drained uint32 // the page being emptied, which gets no records; plus 1
}

// head describes a page. Its numbers of pages and records are plus 1, so that 0 is none.
type head struct {
	next, prev uint32 // in the list of its class
	free       uint16 // first of the linked free records
	used       uint16
	class      uint8
	stuck      bool // has records that could not move; always true for page 0
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

// plenty reports whether there are enough free records without an empty page.
func (s *slab[T, P]) plenty() bool { return s.spare >= page+page/4 }

// roomy returns the fullest page with a free record.
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

// file puts a page into the list of its class.
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
	if n == 0 { // record 0 is never used, and the page stays
		s.heads[0].free, s.heads[0].used, s.heads[0].stuck = 2, 1, true
		s.spare--
	}
	s.file(n)
	return n
}

func (s *slab[T, P]) grown() int { return len(s.pages) + len(s.pages)/4 + 8 }

// remove frees an empty page.
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

// reset frees all pages. No record may be in use.
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

// pageEntry is the memory of each page number, in bytes.
const pageEntry = int64(unsafe.Sizeof(uintptr(0)) + unsafe.Sizeof(head{}))

func (s *slab[T, P]) bytes() int64 {
	return int64(s.live)*s.pageBytes() + int64(cap(s.pages))*pageEntry
}

// growth returns the bytes that n more records add, at times with a page too many.
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

// reclaimable returns an upper bound of the bytes that moving records together frees.
func (s *slab[T, P]) reclaimable() int64 { return int64(s.spare/page) * s.pageBytes() }

// sparse returns the page that needs the fewest moves to be emptied, if other pages have
// room for its records.
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

// unstick lets drain try again a page with records that could not move.
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
