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

// Cutter makes the edits that cut members out of one object, or elements out of one
// list, each with one comma. Call Keep or Drop for each in order. A dropped one
// loses the comma before it if something before it stays, otherwise the one behind.
type Cutter struct {
	Edits *[]Edit // where the changes are appended

	kept bool
	open int // 1 + the edit that takes the next comma, 0 for none
}

// Keep keeps the member or element that a Cursor has passed.
func (k *Cutter) Keep(c *Cursor) {
	k.shut(c.Comma)
	k.kept = true
}

// Drop cuts out the member or element that a Cursor has passed, whose value is
// v.
func (k *Cutter) Drop(c *Cursor, v Span) {
	k.shut(c.Comma)
	start := v.Start
	switch {
	case k.kept:
		start = c.Comma
	case c.shut == '}':
		start = c.KeyAt
		fallthrough
	default:
		k.open = len(*k.Edits) + 1
	}
	*k.Edits = append(*k.Edits, Edit{Span: Span{start, v.End}})
}

func (k *Cutter) shut(comma int) {
	if k.open > 0 {
		(*k.Edits)[k.open-1].End = comma + 1
		k.open = 0
	}
}
