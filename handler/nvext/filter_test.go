package nvext

import (
	"bytes"
	"cmp"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// marks are what the tests put in: members that nothing else has.
var marks = Additions{
	Each:  []Member{{"zz_each", []byte(`{"decode_worker_id":7}`)}},
	Final: func() []Member { return []Member{{"zz_final", []byte(`{"request_received_ms":1}`)}} },
}

const (
	markEach  = `"zz_each":{"decode_worker_id":7}`
	markFinal = `"zz_final":{"request_received_ms":1}`
	markBoth  = markEach + "," + markFinal
)

func TestSplice(t *testing.T) {
	const head = `{"id":"c","choices":[{"index":0,"delta":{"content":"a\"]}"}`
	for _, c := range []struct {
		name, in, chunk, plain string // out; empty for unchanged
	}{
		{"Chunk", head + `,"finish_reason":null}]}`, head + `,"finish_reason":null}],"nvext":{` + markEach + `}}`, head + `,"finish_reason":null}],"nvext":{` + markBoth + `}}`},
		{"NoReasonYet", ` ` + head + `}] } `, ` ` + head + `}] ,"nvext":{` + markEach + `}} `, ` ` + head + `}] ,"nvext":{` + markBoth + `}} `},
		{"Last", head + `,"finish_reason":"stop"}]}`, head + `,"finish_reason":"stop"}],"nvext":{` + markBoth + `}}`, head + `,"finish_reason":"stop"}],"nvext":{` + markBoth + `}}`},
		{"LastOfSeveral", `{"choices":[{"finish_reason":null},{"finish_reason":"length"}]}`, `{"choices":[{"finish_reason":null},{"finish_reason":"length"}],"nvext":{` + markBoth + `}}`, `{"choices":[{"finish_reason":null},{"finish_reason":"length"}],"nvext":{` + markBoth + `}}`},
		{"EmptyReason", `{"choices":[{"finish_reason":""}]}`, `{"choices":[{"finish_reason":""}],"nvext":{` + markEach + `}}`, `{"choices":[{"finish_reason":""}],"nvext":{` + markBoth + `}}`},
		{"Usage", `{"choices":[],"usage":{}}`, `{"choices":[],"usage":{},"nvext":{` + markEach + `}}`, `{"choices":[],"usage":{},"nvext":{` + markBoth + `}}`},
		{"NaN", `{"choices":[{"logprobs":[NaN,-Infinity]}]}`, `{"choices":[{"logprobs":[NaN,-Infinity]}],"nvext":{` + markEach + `}}`, `{"choices":[{"logprobs":[NaN,-Infinity]}],"nvext":{` + markBoth + `}}`},
		{"Merged", `{"nvext":{"routed_experts":[[1]]},"choices":[]}`, `{"nvext":{"routed_experts":[[1]],` + markEach + `},"choices":[]}`, `{"nvext":{"routed_experts":[[1]],` + markBoth + `},"choices":[]}`},
		{"MergedWithNothing", `{"nvext":{ },"choices":[]}`, `{"nvext":{ ` + markEach + `},"choices":[]}`, `{"nvext":{ ` + markBoth + `},"choices":[]}`},
		{"Replaced", `{"choices":[],"nvext":{"a":1,"zz_each":{"decode_worker_id":99} ,"b":2}}`, `{"choices":[],"nvext":{"a":1,` + markEach + ` ,"b":2}}`, `{"choices":[],"nvext":{"a":1,` + markEach + ` ,"b":2,` + markFinal + `}}`},
		{"ReplacedAll", `{"choices":[],"nvext":{"zz_final":0,"zz_each":null}}`, `{"choices":[],"nvext":{"zz_final":0,` + markEach + `}}`, `{"choices":[],"nvext":{` + markFinal + `,` + markEach + `}}`},
		{"ReplacedTwice", `{"choices":[],"nvext":{"zz_each":1,"zz_each":2}}`, `{"choices":[],"nvext":{` + markEach + `,` + markEach + `}}`, `{"choices":[],"nvext":{` + markEach + `,` + markEach + `,` + markFinal + `}}`},
		{"Null", `{"choices":[],"nvext":null}`, `{"choices":[],"nvext":{` + markEach + `}}`, `{"choices":[],"nvext":{` + markBoth + `}}`},
		{"NullError", `{"choices":[],"error":null}`, `{"choices":[],"error":null,"nvext":{` + markEach + `}}`, `{"choices":[],"error":null,"nvext":{` + markBoth + `}}`},
		{"Nested", `{"choices":[{"nvext":{},"error":1}]}`, `{"choices":[{"nvext":{},"error":1}],"nvext":{` + markEach + `}}`, `{"choices":[{"nvext":{},"error":1}],"nvext":{` + markBoth + `}}`},
		{"NoChoices", `{"id":"c"}`, ``, `{"id":"c","nvext":{` + markBoth + `}}`},
		{"ChoicesOfNoList", `{"choices":{}}`, ``, `{"choices":{},"nvext":{` + markBoth + `}}`},
		{"Empty", `{}`, ``, `{"nvext":{` + markBoth + `}}`},
		{"Error", `{"choices":[],"error":{"message":"m"}}`, ``, ``},
		{"FlatError", `{"object":"error","choices":[]}`, ``, ``},
		{"StrangeNvext", `{"choices":[],"nvext":[1]}`, ``, ``},
		{"Done", `[DONE]`, ``, ``},
		{"Array", `[{"choices":[]}]`, ``, ``},
		{"Text", `"choices"`, ``, ``},
		{"Nothing", ` `, ``, ``},
		{"Cut", `{"choices":[]`, ``, ``},
		{"Trailing", `{"choices":[]} x`, ``, ``},
		{"Brackets", `{"choices":[}]}`, ``, ``},
		{"TooDeep", `{"choices":` + strings.Repeat("[", 9999) + strings.Repeat("]", 9999) + `}`, ``, ``},
	} {
		for i, want := range []string{c.chunk, c.plain} {
			edits := marks.Edits([]byte(c.in), i == 0)
			if out := rawjson.Splice(nil, []byte(c.in), edits); len(edits) > 0 != (want != "") || string(out) != cmp.Or(want, c.in) {
				t.Errorf("%s: %s, %v; want %s", c.name, out, edits, want)
			}
		}
	}
	if edits := (&Additions{}).Edits([]byte(`{"choices":[]}`), true); len(edits) > 0 {
		t.Errorf("with nothing to add: %v", edits)
	}
}

// filtered passes a stream through a filter in reads of these lengths.
func filtered(t testing.TB, f *StreamFilter, reads [][]byte) []byte {
	t.Helper()
	var out []byte
	for _, p := range reads {
		out = append(out, f.Write(slices.Clone(p))...)
		if len(f.held) > MaxEvent+len(p) {
			t.Fatalf("%d bytes held", len(f.held))
		}
	}
	return append(out, f.End()...)
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

// However the stream is written and cut, chunks have their members, and all
// else is as it came.
func TestStreamFilterChangesChunksOnly(t *testing.T) {
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 7))
		eol := []string{"\n", "\r\n", "\r"}[r.IntN(3)]
		event := func(lines ...string) string { return strings.Join(lines, eol) + eol + eol }
		long := strings.Repeat("x", r.IntN(300))
		others := []string{
			event(": ping"), ": ping" + eol, eol, event("event: x", "id: 7"), event("data: [DONE]"), event("data:"), event("data"), event("event: token_ids", ": [1]"),
			event("event: error", `data: {"choices":[]}`), event(`data: {"choices":[]}`, "event: x"), event("data: {", `data: "choices":[]}`), event(`data: {"choices":[]}`, "data"),
			event(`data: {"error":{"message":"m"},"choices":[]}`), event(`data: {"object":"error"}`), event(`data: {"choices":[]`), event("xdata: " + `{"choices":[]}`),
			event("data: " + long), event(`data: {"choices":[],"nvext":7}`),
		}
		chunks := [][2]string{
			{event(`data: {"choices":[{"delta":{"content":"` + long + `"}}]}`), event(`data: {"choices":[{"delta":{"content":"` + long + `"}}],"nvext":{` + markEach + `}}`)},
			{event(`data:{"choices":[{"finish_reason":"stop"}]}`), event(`data:{"choices":[{"finish_reason":"stop"}],"nvext":{` + markBoth + `}}`)},
			{event("id: 3", `data: {"choices":[]} `, ": x", "retry: 3"), event("id: 3", `data: {"choices":[],"nvext":{`+markEach+`}} `, ": x", "retry: 3")},
			{event(`data: {"nvext":{"a":1},"choices":[]}`), event(`data: {"nvext":{"a":1,` + markEach + `},"choices":[]}`)},
		}
		var in, want strings.Builder
		for range 1 + r.IntN(6) {
			if r.IntN(2) == 0 {
				c := chunks[r.IntN(len(chunks))]
				in.WriteString(c[0])
				want.WriteString(c[1])
				continue
			}
			o := others[r.IntN(len(others))]
			in.WriteString(o)
			want.WriteString(o)
		}
		if r.IntN(4) == 0 { // a stream that ends in the middle
			in.WriteString(`data: {"choices":[`)
			want.WriteString(`data: {"choices":[`)
		}
		reads := cut(r, []byte(in.String()))
		if got := filtered(t, &StreamFilter{Additions: marks}, reads); string(got) != want.String() {
			t.Fatalf("seed %d: %q\nbecame %q\nwant   %q", seed, reads, got, want.String())
		}
	}
}

func TestStreamFilterForwardsAtOnce(t *testing.T) {
	const chunk = `data: {"choices":[]}` + "\n\n"
	for _, c := range []struct{ in, out string }{
		{"data: [DONE]\n\n", "data: [DONE]\n\n"},
		{"\n", "\n"},
		{": x\n\ndata: {\"id\":", ": x\n\n"},
		{": ping\n", ": ping\n"},
		{": ping\r", ""},
		{chunk[:len(chunk)-1], ""},
		{chunk + chunk[:9], `data: {"choices":[],"nvext":{` + markEach + "}}\n\n"},
		{"data: {\"choices\":[]}\r\n\r", `data: {"choices":[],"nvext":{` + markEach + "}}\r\n\r"},
	} {
		f := StreamFilter{Additions: marks}
		if got := string(f.Write([]byte(c.in))); got != c.out {
			t.Errorf("%q: %q at once", c.in, got)
		}
	}
	f := StreamFilter{Additions: marks}
	p := []byte("data: [DONE]\n\n: x\n\n")
	if got := f.Write(p); len(got) != len(p) || &got[0] != &p[0] {
		t.Error("events that stay are copied")
	}
}

func TestStreamFilterDoesNotAllocate(t *testing.T) {
	chunk := []byte(`data: {"id":"c","choices":[{"index":0,"text":"a \"b\"\n","logprobs":null,"finish_reason":null}]}` + "\n\n")
	f := StreamFilter{Additions: marks}
	if n := testing.AllocsPerRun(100, func() { f.Write(chunk) }); n > 0 {
		t.Errorf("%v allocations for a chunk", n)
	}
	if n := testing.AllocsPerRun(100, func() {
		for i := 0; i < len(chunk); i += 10 {
			f.Write(chunk[i:min(i+10, len(chunk))])
		}
	}); n > 0 {
		t.Errorf("%v allocations for a chunk in pieces", n)
	}
}

func TestStreamFilterIsBounded(t *testing.T) {
	const chunk, after = `data: {"choices":[]}` + "\r\n\r\n", `data: {"choices":[],"nvext":{` + markEach + "}}\r\n\r\n"
	for _, long := range []string{
		`data: {"choices":[],"x":"` + strings.Repeat("x", 2*MaxEvent) + `"}` + "\r\n\r\n",
		strings.Repeat("id: 12345678901234567890123456789\r\n", MaxEvent/30) + "\r\n",
		": " + strings.Repeat("x", 2*MaxEvent) + "\r\n",
	} {
		in := []byte(chunk + long + chunk)
		for _, size := range []int{1000, 1 << 16, len(in)} {
			f := StreamFilter{Additions: marks}
			got := filtered(t, &f, slices.Collect(slices.Chunk(in, size)))
			if string(got) != after+long+after || f.Skipped() != 1 {
				t.Errorf("in reads of %d: %d bytes of %d, %d skipped", size, len(got), len(in), f.Skipped())
			}
		}
	}
}

func TestAnswerFilter(t *testing.T) {
	for in, want := range map[string]string{
		`{"choices":[{"finish_reason":"stop"}],"nvext":{"routed_experts":1}}`: `{"choices":[{"finish_reason":"stop"}],"nvext":{"routed_experts":1,` + markBoth + `}}`,
		`{"data":[]}` + "\n": `{"data":[],"nvext":{` + markBoth + "}}\n",
		`{"error":{}}`:       `{"error":{}}`,
		`{"choices":[`:       `{"choices":[`,
		`x`:                  `x`,
		``:                   ``,
	} {
		for _, size := range []int{1, 7, 1000} {
			f := AnswerFilter{Additions: marks}
			var got []byte
			for p := range slices.Chunk([]byte(in), size) {
				got = append(got, f.Write(p)...)
			}
			if got = append(got, f.End()...); string(got) != want || f.Skipped() {
				t.Errorf("%s: %s", in, got)
			}
		}
	}
	f := AnswerFilter{Additions: marks}
	piece := []byte(strings.Repeat(" ", MaxAnswer/3))
	total := 0
	for range 7 {
		total += len(f.Write(piece))
		if len(f.held) > MaxAnswer {
			t.Fatalf("%d bytes held", len(f.held))
		}
	}
	if total += len(f.End()); total != 7*len(piece) || !f.Skipped() {
		t.Errorf("%d bytes of %d, skipped %v", total, 7*len(piece), f.Skipped())
	}
}

// FuzzStreamFilter checks that the split does not matter, that nothing but the
// members is put in, and that chunks stay JSON.
func FuzzStreamFilter(f *testing.F) {
	f.Add(uint64(1), []byte("data: {\"choices\":[{}]}\r\n\r\ndata: {\"choices\":[],\"nvext\":{\"a\":1}}\r\n\r\ndata: [DONE]\r\n\r\n"))
	f.Add(uint64(2), []byte(": x\n\ndata: {\ndata: \"choices\":[]}\r\rdata"))
	f.Add(uint64(3), []byte("data: {\"nvext\":{ },\"choices\":[{\"finish_reason\":\"stop\"}]}\n\nevent: error\ndata: {}\n\ndata:{\"choices\":[]}\r\r\n\n"))
	f.Fuzz(func(t *testing.T, seed uint64, stream []byte) {
		if bytes.Contains(stream, []byte("zz_")) {
			return
		}
		one := filtered(t, &StreamFilter{Additions: marks}, [][]byte{stream})
		many := filtered(t, &StreamFilter{Additions: marks}, cut(rand.New(rand.NewPCG(seed, 9)), stream))
		if !bytes.Equal(one, many) {
			t.Fatalf("the split matters: %q %q", one, many)
		}
		// What was in an nvext of nothing, or null, cannot be told.
		if !bytes.Contains(stream, []byte("null")) && !bytes.Contains(stream, []byte(`,"nvext":{}`)) && !bytes.Contains(stream, []byte("\\")) && !bytes.Equal(unmarked(one), stream) {
			t.Fatalf("%q became %q, and without the members %q", stream, one, unmarked(one))
		}
		var a AnswerFilter
		a.Additions = marks
		a.Write(stream)
		if plain := a.End(); json.Valid(stream) && !json.Valid(plain) {
			t.Fatalf("%q became %q", stream, plain)
		}
	})
}

// unmarked takes out what the filter has put in.
func unmarked(b []byte) []byte {
	for _, mark := range []string{markBoth, markEach} {
		for _, how := range []string{`,"nvext":{` + mark + `}`, "," + mark, mark} {
			b = bytes.ReplaceAll(b, []byte(how), nil)
		}
	}
	return b
}
