package nvext

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Bounds of what the filters hold back, in bytes.
const (
	// MaxEvent is the longest event that is changed: one with the experts or
	// the logprobs of a prompt may be long.
	MaxEvent = 1 << 20
	// MaxAnswer is the longest plain answer that is changed.
	MaxAnswer = 16 << 20
)

// StreamFilter puts additions into the chunks of a stream of server-sent
// events (WHATWG HTML, 9.2): into each event that is one line of data, has no
// name, and is an object with a list of choices and no error. All other bytes
// pass as they are: comments, named events, data of several lines, [DONE], and
// events longer than MaxEvent, which Skipped counts. An event that a read cuts
// is held back until it is whole. The filter is for one stream; nothing is
// allocated but two buffers that grow to the longest event and read.
type StreamFilter struct {
	Additions

	held []byte // the beginning of an event that is not whole
	out  []byte // what Write returns, where a chunk was changed
	// The event that b[i] begins, as far as it was read: offsets from i.
	line    int          // the line that is not whole begins here
	seen    int          // and has no end before this
	fields  int          // lines that are no comments
	lines   int          // lines of data
	data    rawjson.Span // the last of these, what is behind the colon
	named   bool
	passing bool // in an event that is too long
	comment bool // which is but a comment
	mid     bool // in a line of it that is not empty
	cr      bool // the last byte was a CR: an LF now belongs to it
	skipped int
}

// Skipped returns how many events have passed as they were because they are
// too long.
func (f *StreamFilter) Skipped() int { return f.skipped }

// Write takes the next bytes of the stream and returns those to be forwarded.
// They are good until the next call, and as long as p is.
func (f *StreamFilter) Write(p []byte) []byte {
	b := p
	held := len(f.held) > 0
	if held {
		f.held = append(f.held, p...)
		b = f.held
	}
	f.out = f.out[:0]
	i, from := f.behindCR(b), 0
	for i < len(b) {
		if f.passing {
			i = f.pass(b, i)
			continue
		}
		n := f.event(b[i:])
		if n == 0 && len(b)-i <= MaxEvent {
			break
		}
		if n == 0 {
			f.passing, f.comment, f.mid = true, b[i] == ':', false
			f.skipped++
			f.begin()
			continue
		}
		switch {
		case n > MaxEvent:
			f.skipped++
		case f.lines == 1 && !f.named:
			data := rawjson.Span{Start: i + f.data.Start, End: i + f.data.End}
			from = f.change(b, from, data)
		}
		f.begin()
		i += n
		f.cr = i == len(b) && b[i-1] == '\r'
	}
	return f.forward(b, from, i, held)
}

// End returns what is held back when the stream is over. It is an event that
// was cut, and passes as it is.
func (f *StreamFilter) End() []byte {
	b := f.held
	f.held = nil
	return b
}

// behindCR returns where to begin: behind an LF that belongs to a CR.
func (f *StreamFilter) behindCR(b []byte) int {
	if f.cr && len(b) > 0 {
		f.cr = false
		if b[0] == '\n' {
			return 1
		}
	}
	return 0
}

// change writes b[from:] up to the end of the data, with the additions in it,
// and returns that end; or from, if the data stays as it is.
func (f *StreamFilter) change(b []byte, from int, data rawjson.Span) int {
	edits := f.Edits(data.Of(b), true)
	if len(edits) == 0 {
		return from
	}
	f.out = rawjson.Splice(append(f.out, b[from:data.Start]...), data.Of(b), edits)
	return data.End
}

// forward returns what is to be forwarded of b up to i, of which b[:from] is in
// out, and holds back the rest.
func (f *StreamFilter) forward(b []byte, from, i int, held bool) []byte {
	if !held {
		f.held = append(f.held[:0], b[i:]...)
		if from == 0 {
			return b[:i]
		}
	}
	f.out = append(f.out, b[from:i]...)
	if held {
		f.held = f.held[:copy(f.held, b[i:])]
	}
	return f.out
}

// begin prepares for the next event.
func (f *StreamFilter) begin() {
	f.line, f.seen, f.fields, f.lines, f.named = 0, 0, 0, 0, false
}

// event reads on in the event that b begins with, and returns its length, 0 if
// it is not whole. A comment or an empty line before its first field is an
// event of its own: it may be there to keep a connection alive.
func (f *StreamFilter) event(b []byte) int {
	for f.line < len(b) {
		end := f.seen + lineEnd(b[f.seen:])
		blank := end == f.line
		if f.seen = end; end == len(b) || b[end] == '\r' && end+1 == len(b) && !blank {
			return 0
		}
		next := lineNext(b, end)
		if blank {
			return next
		}
		f.field(b, f.line, end)
		f.line, f.seen = next, next
		if f.fields == 0 {
			return next
		}
	}
	return 0
}

// field reads the line b[start:end] of an event.
func (f *StreamFilter) field(b []byte, start, end int) {
	name, at := end, end // where the name ends, and the value begins
	if colon := bytes.IndexByte(b[start:end], ':'); colon >= 0 {
		name, at = start+colon, start+colon+1
	}
	if name == start {
		return // a comment
	}
	f.fields++
	switch string(b[start:name]) {
	case "data":
		f.lines++
		f.data = rawjson.Span{Start: at, End: end}
	case "event":
		f.named = true
	}
}

// pass reads on in an event that passes, up to its end or b's.
func (f *StreamFilter) pass(b []byte, i int) int {
	for i < len(b) {
		end := i + lineEnd(b[i:])
		if end == len(b) {
			f.mid = f.mid || end > i
			return end
		}
		blank := end == i && !f.mid
		i = lineNext(b, end)
		f.mid = false
		f.cr = i == len(b) && b[i-1] == '\r'
		if blank || f.comment {
			f.passing = false
			return i
		}
	}
	return i
}

// lineEnd returns where the first line of b ends, len(b) if it does not.
func lineEnd(b []byte) int {
	end := bytes.IndexByte(b, '\n')
	if end < 0 {
		end = len(b)
	}
	if cr := bytes.IndexByte(b[:end], '\r'); cr >= 0 {
		return cr
	}
	return end
}

// lineNext returns where the line behind the one that ends at b[end] begins.
func lineNext(b []byte, end int) int {
	if b[end] == '\r' && end+1 < len(b) && b[end+1] == '\n' {
		return end + 2
	}
	return end + 1
}

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
