package api

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// maxHeld is the longest event that is held back until it is whole, in bytes.
// A usage chunk is far shorter.
const maxHeld = 64 << 10

// UsageFilter takes the usage chunk out of a stream whose engine was asked for
// it by AskUsage and not by the client: the event whose data has an empty list
// of choices and a usage object. Where it says more than that, as llama.cpp's
// does its timings, only the usage is taken out; an error passes whole. All
// other bytes pass as they are. An event
// that a read cuts is held back until it is known not to be that chunk, which
// for chunks with choices is as soon as these are seen; nothing else is.
// Where an event has a comment within, this goes with it. The zero value is
// ready for use, for one stream.
type UsageFilter struct {
	held    []byte // the beginning of an event that is not decided
	data    []byte // an event's data, where it has several lines
	passing bool   // in an event that passes
	mid     bool   // in a line of it that is not empty, or of a comment
	comment bool   // in a comment before an event
	cr      bool   // the last byte was a CR: an LF now belongs to it
	drop    bool   // and goes as it went
}

// Write takes the next bytes of the stream and returns those to be forwarded.
// They are a part of p, in which what remains has been moved together, unless
// an event was held back before: then they may be more than p. They are good
// until the next call.
func (f *UsageFilter) Write(p []byte) []byte {
	if f.cr && len(p) > 0 {
		f.cr = false
		if p[0] == '\n' && f.drop {
			p = p[1:]
		} else if p[0] == '\n' {
			return f.filter(p, 1)
		}
	}
	if len(f.held) > 0 {
		f.held = append(f.held, p...)
		return f.filter(f.held, 0)
	}
	return f.filter(p, 0)
}

// End says that the stream is over, and returns what was held back, if it is
// to be forwarded.
func (f *UsageFilter) End() []byte {
	b := f.held
	f.held = nil
	switch _, is, cut := f.judge(b, 0, true); is {
	case isUsage:
		return nil
	case isMixed:
		return append(b[:cut.Start], b[cut.End:]...)
	case undecided, isOther:
	}
	return b
}

// filter reads b from i on, in front of which all passes.
func (f *UsageFilter) filter(b []byte, i int) []byte {
	kept, from := 0, 0 // b[:kept] passes, as does b[from:]
	for i < len(b) {
		if f.passing || f.comment || b[i] == ':' {
			i = f.pass(b, i)
			continue
		}
		if next, blank := lineBreak(b, i); blank {
			i = next
			f.cr, f.drop = i == len(b) && b[i-1] == '\r', false
			continue
		}
		next, is, cut := f.judge(b, i, false)
		switch {
		case is == undecided:
			kept += copy(b[kept:], b[from:i])
			f.hold(b, i)
			return b[:kept]
		case is == isUsage:
			kept += copy(b[kept:], b[from:i])
			from = next
			f.cr, f.drop = next == len(b) && b[next-1] == '\r', true
		case is == isMixed:
			kept += copy(b[kept:], b[from:cut.Start])
			from = cut.End
			f.cr, f.drop = next == len(b) && b[next-1] == '\r', false
		case next == i: // not whole yet
			f.passing = true
		default:
			f.cr, f.drop = next == len(b) && b[next-1] == '\r', false
		}
		i = next
	}
	f.held = f.held[:0]
	if from == 0 {
		return b
	}
	kept += copy(b[kept:], b[from:])
	return b[:kept]
}

// hold keeps b[i:] for the next call.
func (f *UsageFilter) hold(b []byte, i int) {
	if len(f.held) > 0 { // b is held; what is in front of i is being returned
		f.held = b[i:]
		return
	}
	f.held = append(f.held[:0], b[i:]...)
}

// pass reads on in an event that passes, or a comment, up to its end or b's.
func (f *UsageFilter) pass(b []byte, i int) int {
	if !f.passing {
		f.comment, f.mid = true, true
	}
	for i < len(b) {
		end := lineEnd(b, i)
		if end == len(b) {
			f.mid = f.mid || end > i
			return end
		}
		blank := end == i && !f.mid
		i = lineNext(b, end)
		f.mid = false
		f.cr, f.drop = i == len(b) && b[i-1] == '\r', false
		if blank || f.comment {
			f.passing, f.comment = false, false
			return i
		}
	}
	return i
}

// verdict is what an event is known to be.
type verdict uint8

const (
	undecided verdict = iota
	isUsage
	isMixed // usage, and more
	isOther
)

// judge reads the event at b[i] and returns the index behind it and what it
// is; the index is i if it is not whole. Of a mixed one it says what of b is to
// be cut. With over nothing more will come.
func (f *UsageFilter) judge(b []byte, i int, over bool) (next int, is verdict, cut rawjson.Span) {
	var data []byte
	lines, dataAt := 0, 0
	whole := func() (verdict, rawjson.Span) {
		is, cut := judgeData(data, true)
		if is == isMixed && lines > 1 {
			return isOther, rawjson.Span{} // no engine does that
		}
		return is, rawjson.Span{Start: cut.Start + dataAt, End: cut.End + dataAt}
	}
	for at := i; at < len(b); {
		end := lineEnd(b, at)
		line := b[at:end]
		if rest, ok := dataLine(line); ok {
			switch lines++; lines {
			case 1:
				data, dataAt = rest, end-len(rest)
			case 2:
				f.data = append(f.data[:0], data...)
				fallthrough
			default:
				f.data = append(append(f.data, '\n'), rest...)
				data = f.data
			}
		}
		if end == len(b) {
			break
		}
		at = lineNext(b, end)
		if len(line) == 0 {
			if at-i > maxHeld {
				return at, isOther, rawjson.Span{}
			}
			is, cut = whole()
			return at, is, cut
		}
	}
	switch {
	case over:
		is, cut = whole()
		return len(b), is, cut
	case len(b)-i > maxHeld:
		return i, isOther, rawjson.Span{}
	case lines == 1:
		if is, _ = judgeData(data, false); is == isOther {
			return i, isOther, rawjson.Span{}
		}
	}
	return i, undecided, rawjson.Span{}
}

// judgeData tells by an event's data, of which there may be more to come
// unless it is whole. Of a mixed one it says where the usage is.
func judgeData(data []byte, whole bool) (is verdict, usage rawjson.Span) {
	none := undecided
	if whole {
		none = isOther
	}
	i := rawjson.SkipSpace(data, 0)
	if i == len(data) {
		return none, rawjson.Span{}
	}
	if data[i] != '{' {
		return isOther, rawjson.Span{}
	}
	empty, mixed := false, false
	c := rawjson.Enter(data, i)
	for c.Next() {
		key, from := c.Key(), c.KeyAt
		if c.Comma >= 0 {
			from = c.Comma
		}
		switch string(key) {
		case "choices":
			at := rawjson.SkipSpace(data, c.At+1)
			if data[c.At] != '[' || at < len(data) && data[at] != ']' {
				return isOther, rawjson.Span{}
			}
			empty = true
			c.Value()
		case "usage":
			if data[c.At] != '{' {
				return isOther, rawjson.Span{}
			}
			usage = rawjson.Span{Start: from, End: c.Value().End}
		case "id", "object", "created", "model", "system_fingerprint", "service_tier":
			c.Value()
		case "error":
			v := c.Value()
			if v.End == len(data) {
				return none, rawjson.Span{} // it may be cut
			}
			if v.End > 0 && !v.IsNull(data) {
				return isOther, rawjson.Span{}
			}
		default:
			v := c.Value()
			mixed = mixed || v.End > 0 && !v.IsNull(data)
		}
	}
	switch {
	case !c.Done || !whole:
		return none, rawjson.Span{}
	case !empty || usage == (rawjson.Span{}) || rawjson.SkipSpace(data, c.At) != len(data):
		return isOther, rawjson.Span{}
	case !mixed:
		return isUsage, usage
	}
	if data[usage.Start] != ',' { // the first member: the comma behind it goes
		usage.End = 1 + bytes.IndexByte(data[usage.End:], ',') + usage.End
	}
	return isMixed, usage
}

// dataLine returns the value of a line of the field data.
func dataLine(line []byte) (rest []byte, ok bool) {
	rest, ok = bytes.CutPrefix(line, []byte("data"))
	if !ok || len(rest) > 0 && rest[0] != ':' {
		return nil, false
	}
	return bytes.TrimPrefix(bytes.TrimPrefix(rest, []byte(":")), []byte(" ")), true
}

// lineEnd returns where the line that b[i] is in ends, len(b) if it does not.
func lineEnd(b []byte, i int) int {
	p := b[i:]
	end := bytes.IndexByte(p, '\n')
	if end < 0 {
		end = len(p)
	}
	if cr := bytes.IndexByte(p[:end], '\r'); cr >= 0 {
		end = cr
	}
	return i + end
}

// lineNext returns where the line behind the one that ends at b[end] begins.
func lineNext(b []byte, end int) int {
	if b[end] == '\r' && end+1 < len(b) && b[end+1] == '\n' {
		return end + 2
	}
	return end + 1
}

// lineBreak returns the index behind an empty line at b[i].
func lineBreak(b []byte, i int) (next int, blank bool) {
	if b[i] != '\n' && b[i] != '\r' {
		return i, false
	}
	return lineNext(b, i), true
}
