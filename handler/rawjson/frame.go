package rawjson

import "bytes"

// MaxFrame is the length of the longest event that is read or changed, in bytes.
const MaxFrame = 1 << 20

// Frame is one event of a stream of server-sent events. It is valid until the
// next call of its Framer.
type Frame struct {
	Data         []byte // the values of its data lines, with a line feed between two
	Lines        int    // how many data lines it has
	Named        bool   // it has a name
	UnknownField bool   // it has a field that events do not have
	Failed       bool   // its name is error, or its data are in a field error, as in old llama.cpp
	Long         bool   // it is longer than MaxFrame, and its end may not have come; the other fields are unset
	Cut          bool   // the stream ended before the empty line that ends an event
}

// Framer cuts a stream of server-sent events (WHATWG HTML, 9.2) into frames.
// Lines end in LF, CRLF or CR, and reads may cut them anywhere. Comments and
// empty lines between events are in no frame. An event that lies in one read is
// not copied, unless it has several lines of data. The zero value is ready for
// use, for one stream.
//
// Give each read to Write, and call Next until it returns false. Forward then returns
// the bytes to forward. The Framer holds an event back until it is whole. Edit and Drop
// change the last frame of Next.
type Framer struct {
	held []byte // the beginning of an event that is not whole
	data []byte // the data of an event that has several lines of it
	out  []byte // memory for what Forward returns, where something was changed
	done []byte // what Forward returns
	more []byte // the rest of the last read, which is still to be read
	b    []byte // what is being read: the next part of the last read, behind held
	from int    // b[:from] is in out, or was dropped
	lf   int    // the first LF in b from seen on, if it is not before seen
	now  event  // being read
	last event  // the frame that was returned
	stream
}

// event is the state of an event that is being read. The indices are into b, and
// negative for bytes that were forwarded before the event was whole.
type event struct {
	Frame
	begin  int
	end    int
	line   int  // where its last line begins
	seen   int  // that line has no end before this
	at     Span // of the only line of data
	fields int  // lines that are no comments
}

// stream is the state of the stream.
type stream struct {
	late bool // the first line, which may begin with a BOM, was read
	ends bool // no more is written
	over bool // no more comes after b
}

// Write gives the Framer the next bytes of the stream, with over the last ones. They
// must not change until Next has returned false and Forward's result is used.
func (f *Framer) Write(p []byte, over bool) {
	f.ends, f.more, f.out = over, p, f.out[:0]
	f.take()
}

// take begins the next part of the last read. It copies only the end of an event that an
// earlier read began, line by line. The rest of the read is the part after that.
func (f *Framer) take() {
	p := f.more
	if len(f.held) > 0 {
		if n := bytes.IndexByte(p, '\n'); n >= 0 {
			p = p[:n+1]
		}
	}
	f.more = f.more[len(p):]
	f.over = f.ends && len(f.more) == 0
	f.b, f.from, f.lf = p, 0, -1
	if len(f.held) > 0 {
		f.held = append(f.held, p...)
		f.b = f.held
	}
}

// Next returns the next frame of what was written.
func (f *Framer) Next() (Frame, bool) {
	for frame, ok := f.next(); ; frame, ok = f.next() {
		if ok || len(f.more) == 0 {
			return frame, ok
		}
		f.take()
	}
}

// next returns the next frame of the part that is being read.
func (f *Framer) next() (Frame, bool) {
	for f.now.begin < len(f.b) {
		wasLong := f.now.Long
		whole := f.read()
		if !whole && !f.over {
			if f.now.Long && f.now.fields > 0 && !wasLong {
				f.last = f.now
				f.last.Frame = Frame{Long: true}
				return f.last.Frame, true
			}
			break
		}
		f.now.Cut = !whole
		if f.now.end-f.now.begin > MaxFrame {
			f.now.Frame = Frame{Long: true}
		} else if f.now.Lines == 1 {
			f.now.Data = f.now.at.Of(f.b)
		} else if f.now.Lines > 1 {
			f.now.Data = f.data
		}
		f.last = f.now
		f.now = event{begin: f.last.end, line: f.last.end, seen: f.last.end}
		if f.last.fields > 0 && !wasLong {
			return f.last.Frame, true
		}
	}
	f.hold()
	return Frame{}, false
}

// read reads an event up to its end, and returns false if that has not come yet. A
// comment before the first field, which may keep a connection alive, is an event of
// its own. An empty line is one, too.
func (f *Framer) read() (whole bool) {
	for f.now.seen < len(f.b) {
		end := f.lineEnd()
		blank := end == f.now.line
		f.now.seen, f.now.end = end, len(f.b)
		if end == len(f.b) || f.b[end] == '\r' && end+1 == len(f.b) && !f.over {
			break // an LF may belong to the CR
		}
		f.now.end = end + 1
		if f.b[end] == '\r' && f.now.end < len(f.b) && f.b[f.now.end] == '\n' {
			f.now.end++
		}
		if blank {
			return true
		}
		f.field(end)
		f.now.line, f.now.seen = f.now.end, f.now.end
		if f.now.fields == 0 {
			return true
		}
	}
	if f.over && f.now.seen > f.now.line {
		f.field(f.now.seen)
	} else if !f.over && !f.now.Long && len(f.b)-f.now.begin > MaxFrame {
		f.field(f.now.seen) // to know a comment
		f.now.Long = true
	}
	f.now.end = len(f.b)
	return false
}

// lineEnd returns where the event's last line ends, len(b) if it does not.
func (f *Framer) lineEnd() int {
	if f.lf < f.now.seen {
		f.lf = len(f.b)
		if n := bytes.IndexByte(f.b[f.now.seen:], '\n'); n >= 0 {
			f.lf = f.now.seen + n
		}
	}
	if n := bytes.IndexByte(f.b[f.now.seen:f.lf], '\r'); n >= 0 {
		return f.now.seen + n
	}
	return f.lf
}

var bom, fieldData = []byte("\xEF\xBB\xBF"), []byte("data")

// field reads the event's last line, which ends at b[end].
func (f *Framer) field(end int) {
	if f.now.Long {
		return
	}
	line := f.b[f.now.line:end]
	if !f.late {
		f.late = true
		line = bytes.TrimPrefix(line, bom)
	}
	name, value, colon := bytes.Cut(line, []byte{':'})
	if len(name) == 0 {
		return // a comment
	}
	f.now.fields++
	value = bytes.TrimPrefix(value, []byte{' '})
	if colon && string(name) == "error" {
		f.now.Failed, name = true, fieldData
	}
	switch string(name) {
	case "data":
		switch f.now.Lines++; f.now.Lines {
		case 1:
			f.now.at = Span{end - len(value), end}
		case 2:
			f.data = append(f.data[:0], f.now.at.Of(f.b)...)
			fallthrough
		default:
			f.data = append(append(f.data, '\n'), value...)
		}
	case "event":
		f.now.Named = true
		f.now.Failed = f.now.Failed || string(value) == "error"
	case "id", "retry":
	default:
		f.now.UnknownField = true
	}
}

// hold keeps what is not whole for the next Write.
func (f *Framer) hold() {
	keep := min(f.now.begin, len(f.b))
	if f.now.Long {
		keep = f.now.seen // it is forwarded as it comes
	}
	if f.done = f.b[:keep]; f.from > 0 || len(f.held) > 0 || len(f.out) > 0 {
		f.out = append(f.out, f.b[f.from:keep]...)
		f.done = f.out
	}
	if keep > 0 || len(f.held) == 0 { // otherwise b is held already
		f.held = append(f.held[:0], f.b[keep:]...)
	}
	f.now.begin -= keep
	f.now.line -= keep
	f.now.seen -= keep
	f.now.at.Start -= keep
	f.now.at.End -= keep
	f.b = nil
}

// Torn returns whether a part of the event that is not whole was forwarded.
func (f *Framer) Torn() bool { return f.now.Long }

// Forward returns the bytes to forward after the last Write, once Next has returned
// false. They are valid until the next Write.
func (f *Framer) Forward() []byte { return f.done }

// Edit changes the data of the frame that Next has returned. The edits are in order. It changes
// nothing if the frame has not exactly one line of data.
func (f *Framer) Edit(edits []Edit) {
	if f.last.Lines != 1 {
		return
	}
	data := f.last.at
	if cap(f.out) == 0 {
		f.out = make([]byte, 0, len(f.b)+len(f.b)/4)
	}
	for _, e := range edits {
		f.out = append(append(f.out, f.b[f.from:data.Start+e.Start]...), e.Text...)
		f.from = data.Start + e.End
	}
}

// Before returns the bytes to forward before the frame that Next has returned, if the stream ends
// there.
func (f *Framer) Before() []byte {
	return append(f.out, f.b[f.from:f.last.begin]...)
}

// Drop takes out the frame that Next has returned.
func (f *Framer) Drop() {
	f.out = append(f.out, f.b[f.from:f.last.begin]...)
	f.from = f.last.end
}
