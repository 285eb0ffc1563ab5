package handler

import (
	"bytes"
	"io"
	"slices"
)

// sending is what one attempt sends of a body: the body as it is, or with a
// member more.
type sending struct {
	of    *replay
	parts [][]byte // nil: the body as it is
	size  int64
}

// with returns the body with a member added at the end of its object: of members
// with one name, decoders take the last. All other bytes stay. A body that does
// not end as an object does stays as it is, which added says.
func (b *replay) with(member string) (s sending, added bool) {
	s = sending{of: b, size: b.size}
	if member == "" {
		return s, false
	}
	part, at := b.lastByte(len(b.parts)-1, -1)
	if part < 0 || b.parts[part][at] != '}' {
		return s, false
	}
	text := []byte("," + member)
	if p, i := b.lastByte(part, at); p >= 0 && b.parts[p][i] == '{' {
		text = text[1:]
	}
	s.size += int64(len(text))
	s.parts = slices.Concat(b.parts[:part], [][]byte{b.parts[part][:at], text, b.parts[part][at:]}, b.parts[part+1:])
	if b.inMemory() {
		s.parts = [][]byte{slices.Concat(s.parts...)}
	}
	return s, true
}

// lastByte returns where the last byte is that is no white space, in front of
// one in a part; negative: the part's end. It returns -1 if there is none.
func (b *replay) lastByte(part, before int) (int, int) {
	for ; part >= 0; part, before = part-1, -1 {
		bytes := b.parts[part]
		if before < 0 {
			before = len(bytes)
		}
		for i := before - 1; i >= 0; i-- {
			switch bytes[i] {
			case ' ', '\t', '\r', '\n':
			default:
				return part, i
			}
		}
	}
	return -1, -1
}

// open returns what is sent, from its first byte. It must be called as open of
// the body.
func (s sending) open() io.ReadCloser {
	switch {
	case s.parts == nil:
		return s.of.open()
	case s.of.inMemory():
		return io.NopCloser(bytes.NewReader(s.parts[0]))
	}
	s.of.users.Add(1)
	return &replayReader{of: s.of, parts: s.parts}
}
