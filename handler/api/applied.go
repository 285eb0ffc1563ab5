package api

// Apply returns the body with the changes made: a copy. Nothing may be changed
// after it.
func (e *Editor) Apply() []byte { return e.Spliced(Span{End: len(e.body)}, e.Edits()) }

// Spliced returns a part of the body with these changes made, which must be in
// order and within it: a copy.
func (e *Editor) Spliced(part Span, edits []Edit) []byte {
	size := part.End - part.Start
	for _, edit := range edits {
		size += len(edit.Text) - (edit.End - edit.Start)
	}
	out, at := make([]byte, 0, size), part.Start
	for _, edit := range edits {
		out = append(append(out, e.body[at:edit.Start]...), edit.Text...)
		at = edit.End
	}
	return append(out, e.body[at:part.End]...)
}
