package nvext

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// MaxAnswer is the longest plain answer that an AnswerFilter changes, in bytes.
const MaxAnswer = 16 << 20

// AnswerFilter puts additions into a plain answer: a JSON object that is no
// error. It holds the answer until that is complete; an engine sends it in one
// piece. An answer longer than MaxAnswer passes unchanged.
type AnswerFilter struct {
	Additions

	held    []byte
	skipped bool
}

// Skipped returns whether the answer passed unchanged because of its length.
func (f *AnswerFilter) Skipped() bool { return f.skipped }

// Write adds the next bytes of the answer and returns the bytes to forward: none
// unless the answer is too long.
func (f *AnswerFilter) Write(p []byte) []byte {
	if f.skipped {
		return p
	}
	f.held = append(f.held, p...)
	if len(f.held) <= MaxAnswer {
		return nil
	}
	f.skipped = true
	b := f.held
	f.held = nil
	return b
}

// End returns the rest of the answer after its last byte. An incomplete answer,
// or one that is no object, passes unchanged.
func (f *AnswerFilter) End() []byte {
	b := f.held
	f.held = nil
	if edits := f.Edits(b, false); len(edits) > 0 {
		return rawjson.Splice(make([]byte, 0, len(b)+1<<10), b, edits)
	}
	return b
}
