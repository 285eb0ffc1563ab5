package api

// Apply returns the body with the changes made: a copy. Nothing may be changed
// after it.
func (e *Editor) Apply() []byte {
	edits := e.Edits()
	size := len(e.body)
	for _, edit := range edits {
		size += len(edit.Text) - (edit.End - edit.Start)
	}
	out, at := make([]byte, 0, size), 0
	for _, edit := range edits {
		out = append(append(out, e.body[at:edit.Start]...), edit.Text...)
		at = edit.End
	}
	return append(out, e.body[at:]...)
}
