package api

import "bytes"

// maxEvent bounds a line, and the data of an event, in bytes. A longer event
// is passed over, and what was in it is unknown.
const maxEvent = 1 << 20

// sse splits a stream of server-sent events (WHATWG HTML, 9.2) into the data
// of each. Lines end in LF, CRLF or CR; reads may cut them anywhere. An event
// that lies in one read as one line of data, which is nearly all of them, is
// handed on where it is; only what a read cuts is copied.
type sse struct {
	line []byte // the beginning of the line that the last read cut
	data []byte // the event's data so far, if it had to be copied
	has  bool   // the event has data, in data or where feed keeps it
	long bool   // the cut line is longer than maxEvent; the rest is dropped
	over bool   // the event has such a line, or too many
	cr   bool   // the last read ended in CR: an LF now belongs to it
	late bool   // the first line, which may begin with a BOM, is behind
	bad  bool   // the event is named error, or has a field of that name
}

// feed reads on and gives each event that ends in p to a.
func (s *sse) feed(p []byte, a *Answer) {
	if s.cr && len(p) > 0 {
		s.cr = false
		if p[0] == '\n' {
			p = p[1:]
		}
	}
	// whole is the event's data while it is one line that was not copied. It
	// points into p or into line.
	var whole []byte
	lf, cr := -1, -1 // the next of each at or behind i
	for i := 0; i < len(p); {
		if lf < i {
			lf = indexFrom(p, i, '\n')
		}
		if cr < i {
			cr = indexFrom(p, i, '\r')
		}
		end := min(lf, cr)
		if end == len(p) {
			whole = s.copyWhole(whole)
			s.keep(p[i:])
			break
		}
		line := p[i:end]
		if s.long || len(s.line) > 0 {
			s.keep(line)
			line = s.line
		} else if len(line) > maxEvent {
			s.long = true
		}
		whole = s.read(line, whole, a)
		s.line, s.long = s.line[:0], false
		i = end + 1
		if p[end] == '\r' {
			if i == len(p) {
				s.cr = true
			} else if p[i] == '\n' {
				i++
			}
		}
	}
	s.copyWhole(whole)
}

// end reads what is left when the stream is over. By the standard an event
// that no empty line ends is dropped; here it may be the [DONE] of an engine
// that saves that line.
func (s *sse) end(a *Answer) {
	var whole []byte
	if s.long || len(s.line) > 0 {
		whole = s.read(s.line, nil, a)
	}
	s.read(nil, whole, a)
}

func indexFrom(p []byte, i int, c byte) int {
	if j := bytes.IndexByte(p[i:], c); j >= 0 {
		return i + j
	}
	return len(p)
}

// keep adds to the cut line.
func (s *sse) keep(p []byte) {
	if s.long {
		return
	}
	if len(s.line)+len(p) > maxEvent {
		// The beginning is enough to tell a comment from data.
		s.long = true
		s.line = append(s.line, p[:min(len(p), max(0, longPrefix-len(s.line)))]...)
		return
	}
	s.line = append(s.line, p...)
}

// longPrefix is how much is looked at of a line that is too long: a BOM and
// the longest field name with its colon.
const longPrefix = 16

var bom = []byte("\xEF\xBB\xBF")

// read takes one line, without its end. It returns the event's data if that
// is still one line that was not copied.
func (s *sse) read(line, whole []byte, a *Answer) []byte {
	if !s.late {
		s.late = true
		line = bytes.TrimPrefix(line, bom)
	}
	if len(line) == 0 {
		s.dispatch(whole, a)
		return nil
	}
	rest, ok := bytes.CutPrefix(line, []byte("data"))
	if !ok {
		s.bad = s.bad || isFault(line)
		return whole
	}
	if len(rest) > 0 {
		if rest[0] != ':' {
			return whole
		}
		rest = bytes.TrimPrefix(rest[1:], []byte(" "))
	}
	if s.long || s.over {
		s.over, s.has = true, true
		return nil
	}
	if !s.has {
		s.has = true
		if len(rest) > 0 {
			return rest
		}
		s.data = s.data[:0]
		return nil
	}
	s.copyWhole(whole)
	if len(s.data)+1+len(rest) > maxEvent {
		s.over = true
		return nil
	}
	s.data = append(s.data, '\n')
	s.data = append(s.data, rest...)
	return nil
}

// isFault tells whether a line says that the event is an error: by its name, as
// some engines end a stream without any data, or by a field of its own, as old
// llama.cpp did.
func isFault(line []byte) bool {
	if name, ok := bytes.CutPrefix(line, []byte("event:")); ok {
		return string(bytes.TrimPrefix(name, []byte(" "))) == "error"
	}
	return bytes.HasPrefix(line, []byte("error:"))
}

func (s *sse) copyWhole(whole []byte) []byte {
	if whole != nil {
		s.data = append(s.data[:0], whole...)
	}
	return nil
}

func (s *sse) dispatch(whole []byte, a *Answer) {
	if s.bad {
		s.bad, a.failed, a.legible = false, true, true
	}
	switch {
	case s.over:
		a.unlike()
		a.legible = true
	case whole != nil:
		a.event(whole)
	case s.has:
		a.event(s.data)
	}
	s.has, s.over = false, false
}
