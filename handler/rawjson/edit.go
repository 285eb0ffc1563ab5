package rawjson

import "slices"

// Edit is a change of some bytes: Text replaces the bytes of Span, which may be
// empty. Text may be a part of these bytes.
type Edit struct {
	Span
	Text []byte
}

// Splice appends b to dst with edits made, which must be in order, within b and
// without overlaps.
func Splice(dst, b []byte, edits []Edit) []byte {
	grow := len(b)
	for _, e := range edits {
		grow += len(e.Text) - e.Len()
	}
	dst = slices.Grow(dst, max(grow, 0))
	at := 0
	for _, e := range edits {
		dst = append(append(dst, b[at:e.Start]...), e.Text...)
		at = e.End
	}
	return append(dst, b[at:]...)
}
