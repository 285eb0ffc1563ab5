package rawjson

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// copied is a Frame that stays as it is.
func copied(f Frame) Frame {
	f.Data = slices.Clone(f.Data)
	return f
}

// framed reads a stream in the given reads, and returns its frames and what is
// forwarded. Change is called for each frame.
func framed(t testing.TB, f *Framer, reads [][]byte, change func(Frame)) (frames []Frame, out []byte) {
	t.Helper()
	for i, p := range append(slices.Clone(reads), nil) {
		p = slices.Clone(p)
		f.Write(p, i == len(reads))
		for frame, ok := f.Next(); ok; frame, ok = f.Next() {
			frames = append(frames, copied(frame))
			if change != nil {
				change(frame)
			}
		}
		out = append(out, f.Forward()...)
		clear(p)
		if len(f.held) > MaxFrame {
			t.Fatalf("%d bytes are held", len(f.held))
		}
	}
	return frames, out
}

// cut splits a stream at random.
func cut(r *rand.Rand, b []byte) (reads [][]byte) {
	for len(b) > 0 {
		n := 1 + r.IntN(min(len(b), 1+r.IntN(80)))
		reads = append(reads, b[:n])
		b = b[n:]
	}
	return reads
}

func TestFramerForms(t *testing.T) {
	a, b := Frame{Data: []byte("A"), Lines: 1}, Frame{Data: []byte("B"), Lines: 1}
	for _, c := range []struct {
		stream string
		want   []Frame
	}{
		{"data: A\n\ndata: B\n\n", []Frame{a, b}},
		{"data:A\r\n\r\ndata:B\r\n\r\n", []Frame{a, b}},
		{"data: A\r\rdata: B\r\r", []Frame{a, b}},
		{"\xEF\xBB\xBFdata: A\n\n:data: X\nid: 3\ndata: B\nretry: 5\n\n", []Frame{a, b}},
		{"\n\n: x\n\ndata: A\n\n\n\n", []Frame{a}},
		{"datax: X\n\ndata\n\n", []Frame{{UnknownField: true}, {Lines: 1}}},
		{"data: A\ndata:B\ndata\n\n", []Frame{{Data: []byte("A\nB\n"), Lines: 3}}},
		{"data:  A\n: x\nevent: x\n\n", []Frame{{Data: []byte(" A"), Lines: 1, Named: true}}},
		{"event: error\n\nevent:errors\n\nerror: x\n\nerror\n\n", []Frame{{Named: true, Failed: true}, {Named: true}, {Data: []byte("x"), Lines: 1, Failed: true}, {UnknownField: true}}},
		{"data: A\n\ndata: B\n", []Frame{a, {Data: []byte("B"), Lines: 1, Cut: true}}},
		{"data: A\n\ndata: B", []Frame{a, {Data: []byte("B"), Lines: 1, Cut: true}}},
		{"data: A\n\ndata: B\r", []Frame{a, {Data: []byte("B"), Lines: 1, Cut: true}}},
		{"data: A\n\n: B", []Frame{a}},
		{"data: A\n\n: " + strings.Repeat("x", 2*MaxFrame) + "\ndata: B\n\n", []Frame{a, b}},
		{"data: A\n\ndata: " + strings.Repeat("x", 2*MaxFrame) + "\r\n\r\ndata: B\n\n", []Frame{a, {Long: true}, b}},
		{"data: A\n\n" + strings.Repeat("data: xxx\r\n", MaxFrame/4) + "\r\ndata: B\n\n", []Frame{a, {Long: true}, b}},
		{"data: A\n\ndata: " + strings.Repeat("x", 2*MaxFrame), []Frame{a, {Long: true}}},
	} {
		for _, size := range []int{1, 2, 3, 1000, 1 << 16, len(c.stream)} {
			if size < 1000 && len(c.stream) > MaxFrame {
				continue
			}
			reads := slices.Collect(slices.Chunk([]byte(c.stream), size))
			got, out := framed(t, new(Framer), reads, nil)
			if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", c.want) {
				t.Errorf("%.60q in reads of %d: %.300v, want %.300v", c.stream, size, got, c.want)
			}
			if string(out) != c.stream {
				t.Errorf("%.60q in reads of %d: %d bytes of %d are forwarded", c.stream, size, len(out), len(c.stream))
			}
		}
	}
}

func TestFramerForwardsAtOnce(t *testing.T) {
	const event = "data: x\n\n"
	for _, c := range []struct{ in, out string }{
		{event, event},
		{"\n", "\n"},
		{": x\n\ndata: {\"id\":", ": x\n\n"},
		{": ping\n", ": ping\n"},
		{": ping\r", ""},
		{event[:len(event)-1], ""},
		{event + event[:3], event},
		{"data: x\r\n\r", ""},
		{"data: " + strings.Repeat("x", MaxFrame), "data: " + strings.Repeat("x", MaxFrame)},
	} {
		f := Framer{}
		f.Write([]byte(c.in), false)
		for _, ok := f.Next(); ok; _, ok = f.Next() { //nolint:revive // as it passes
		}
		if got := string(f.Forward()); got != c.out {
			t.Errorf("%.40q: %.40q at once", c.in, got)
		}
	}
	f := Framer{}
	p := []byte("data: [DONE]\n\n: x\n\n")
	if n := testing.AllocsPerRun(10, func() {
		f.Write(p, false)
		for _, ok := f.Next(); ok; _, ok = f.Next() { //nolint:revive // as it passes
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if got := f.Forward(); len(got) != len(p) || &got[0] != &p[0] {
		t.Error("events that stay are copied")
	}
}

// Reads that cut events are copied only up to the end of the event.
func TestFramerHoldsOneEvent(t *testing.T) {
	for _, end := range []string{"\n\n", "\r\n\r\n"} {
		event := "data: " + strings.Repeat("x", 200) + end
		stream := []byte(strings.Repeat(event, 100))
		f, events := Framer{}, 0
		for at := 0; at < len(stream); at += 4096 {
			p := stream[at:min(at+4096, len(stream))]
			f.Write(p, at+len(p) == len(stream))
			for _, ok := f.Next(); ok; _, ok = f.Next() {
				events++
			}
		}
		if most := 4 * len(event); events != 100 || cap(f.held) > most {
			t.Errorf("%q: %d events, %d bytes of memory for one, want at most %d", end, events, cap(f.held), most)
		}
	}
}

var lineBreak = regexp.MustCompile("\r\n|\r|\n")

// reference reads a stream the plain way.
func reference(stream []byte) (frames []Frame) {
	var now Frame
	var data []string
	fields := 0
	lines := lineBreak.Split(string(bytes.TrimPrefix(stream, bom)), -1)
	for i, line := range lines {
		name, value, colon := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		if now.Cut = i == len(lines)-1; line == "" || now.Cut {
			if name == "data" || name == "error" && colon {
				data, fields = append(data, value), 1
			}
			if name != "" {
				fields = 1
			}
			now.Named = now.Named || name == "event"
			now.Failed = now.Failed || name == "event" && value == "error" || name == "error" && colon
			now.UnknownField = now.UnknownField || name != "" && isUnknown(name, colon)
			if now.Data, now.Lines = []byte(strings.Join(data, "\n")), len(data); fields > 0 {
				frames = append(frames, now)
			}
			now, data, fields = Frame{}, nil, 0
			continue
		}
		if name != "" {
			fields++
			now.UnknownField = now.UnknownField || isUnknown(name, colon)
		}
		switch name {
		case "data":
			data = append(data, value)
		case "event":
			now.Named = true
			now.Failed = now.Failed || value == "error"
		case "error":
			if colon {
				now.Failed, data = true, append(data, value)
			}
		}
	}
	return frames
}

func isUnknown(name string, colon bool) bool {
	return !slices.Contains([]string{"data", "event", "id", "retry"}, name) && (name != "error" || !colon)
}

// FuzzFramer checks frames against the plain reading, however the stream is cut,
// and that Edit and Drop change nothing else.
func FuzzFramer(f *testing.F) {
	f.Add(uint64(1), []byte("data: {\"choices\":[{}]}\r\n\r\nevent: x\r\ndata: y\r\n\r\ndata: [DONE]\r\n\r\n"))
	f.Add(uint64(2), []byte(": x\n\ndata: {\ndata: \"choices\":[]}\r\rdata"))
	f.Add(uint64(3), []byte("\xEF\xBB\xBFdata: a\r\n\n\revent: error\ndata: {}\n\ndata:b\r\r\n\n"))
	f.Fuzz(func(t *testing.T, seed uint64, stream []byte) {
		rng := rand.New(rand.NewPCG(seed, 9))
		if bytes.Contains(stream, bom) && !bytes.HasPrefix(stream, []byte("\xEF\xBB\xBFdata")) {
			return // a BOM is looked for in the first line that is a field
		}
		want := reference(stream)
		for _, reads := range [][][]byte{{stream}, cut(rng, stream)} {
			got, out := framed(t, new(Framer), reads, nil)
			if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
				t.Fatalf("%q: %+v, want %+v", reads, got, want)
			}
			if !bytes.Equal(out, stream) {
				t.Fatalf("%q became %q", reads, out)
			}
		}
		if bytes.Contains(stream, []byte("\x00")) {
			return
		}
		// Drop some frames, and mark the data of others. Without the marks and
		// the frames that are left are those that were not dropped.
		var outs [2]string
		for i, reads := range [][][]byte{{stream}, cut(rng, stream)} {
			e, n := Framer{}, 0
			_, out := framed(t, &e, reads, func(f Frame) {
				switch n++; {
				case (seed>>(n%64))&1 == 0:
					e.Drop()
				default: // also of frames that have not one line of data
					e.Edit([]Edit{{Text: []byte("\x00")}, {Span: Span{len(f.Data) / 2, len(f.Data)}, Text: f.Data[len(f.Data)/2:]}})
				}
			})
			outs[i] = string(out)
		}
		if outs[0] != outs[1] {
			t.Fatalf("the split matters: %q %q", outs[0], outs[1])
		}
		var kept []Frame
		for n, f := range want {
			if (seed>>((n+1)%64))&1 == 1 {
				kept = append(kept, f)
			}
		}
		left := reference([]byte(strings.ReplaceAll(outs[0], "\x00", "")))
		if len(kept) > 0 && len(left) == len(kept) {
			for i := range left { // where the last frame was dropped, the one before is not cut
				if left[i].Cut = kept[i].Cut; fmt.Sprintf("%+v", left) == fmt.Sprintf("%+v", kept) {
					break
				}
			}
		}
		if fmt.Sprintf("%+v", left) != fmt.Sprintf("%+v", kept) && !bytes.HasPrefix(stream, bom) {
			t.Fatalf("%q became %q: %+v, want %+v", stream, outs[0], left, kept)
		}
	})
}
