package nvext

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// MaxAnswer is the longest plain answer that is changed, in bytes.
const MaxAnswer = 16 << 20

// AnswerFilter puts additions into a plain answer: a JSON object that is no
// error. It holds the answer back until it is whole, as an engine sends it in
// one go. One that is longer than MaxAnswer passes as it is.
type AnswerFilter struct {
	Additions

	held    []byte
	skipped bool
}

// Skipped tells whether the answer has passed as it was because it is too
// long.
func (f *AnswerFilter) Skipped() bool { return f.skipped }

// Write takes the next bytes of the answer and returns those to be forwarded,
// which are none unless it is too long.
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

// End returns the answer, or what has come of it, once no more comes. One that
// broke off, or is no object, passes as it is.
func (f *AnswerFilter) End() []byte {
	b := f.held
	f.held = nil
	if edits := f.Edits(b, false); len(edits) > 0 {
		return rawjson.Splice(make([]byte, 0, len(b)+1<<10), b, edits)
	}
	return b
}
