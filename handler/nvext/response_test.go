package nvext

import (
	"bytes"
	"cmp"
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// marks are the additions of the tests: members that nothing else has.
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
		{"Replaced", `{"choices":[],"nvext":{"a":1,"zz_each":{"decode_worker_id":99} ,"b":2}}`, `{"choices":[],"nvext":{"a":1 ,"b":2,` + markEach + `}}`, `{"choices":[],"nvext":{"a":1 ,"b":2,` + markBoth + `}}`},
		{"ReplacedAll", `{"choices":[],"nvext":{"zz_final":0,"zz_each":null}}`, `{"choices":[],"nvext":{"zz_final":0,` + markEach + `}}`, `{"choices":[],"nvext":{` + markBoth + `}}`},
		{"ReplacedTwice", `{"choices":[],"nvext":{"zz_each":1,"zz_each":2}}`, `{"choices":[],"nvext":{` + markEach + `}}`, `{"choices":[],"nvext":{` + markBoth + `}}`},
		{"ReplacedFirst", `{"choices":[],"nvext":{"zz_each":1, "a":2}}`, `{"choices":[],"nvext":{ "a":2,` + markEach + `}}`, `{"choices":[],"nvext":{ "a":2,` + markBoth + `}}`},
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

func TestAdditionsDoNotAllocate(t *testing.T) {
	chunk, a := []byte(`{"id":"c","choices":[{"index":0,"text":"a \"b\"\n","logprobs":null,"finish_reason":null}]}`), marks
	if n := testing.AllocsPerRun(100, func() { a.Edits(chunk, true) }); n > 0 {
		t.Errorf("%v allocations for a chunk", n)
	}
}

// FuzzAdditions checks that only the members are added, and that objects stay JSON.
func FuzzAdditions(f *testing.F) {
	f.Add([]byte(`{"choices":[{}]}`), true)
	f.Add([]byte(`{}`), false)
	f.Add([]byte(`{"choices":[],"nvext":{"a":1}}`), true)
	f.Add([]byte(`{"nvext":{ },"choices":[{"finish_reason":"stop"}]}`), false)
	f.Fuzz(func(t *testing.T, object []byte, chunk bool) {
		if bytes.Contains(object, []byte("zz_")) {
			return
		}
		a := marks
		out := rawjson.Splice(nil, object, a.Edits(object, chunk))
		if json.Valid(object) && !json.Valid(out) {
			t.Fatalf("%q became %q", object, out)
		}
		// Nothing shows whether the nvext was missing, empty or null.
		if bytes.Contains(object, []byte("null")) || bytes.Contains(object, []byte(`"nvext":{}`)) || bytes.Contains(object, []byte("\\")) {
			return
		}
		for _, mark := range []string{markBoth, markEach} {
			for _, how := range []string{`,"nvext":{` + mark + `}`, `"nvext":{` + mark + `}`, "," + mark, mark} {
				out = bytes.ReplaceAll(out, []byte(how), nil)
			}
		}
		if !bytes.Equal(out, object) {
			t.Fatalf("%q became %q without the members", object, out)
		}
	})
}

// The shapes are those of dynamo-llm's WorkerIdInfo, TimingInfo and Annotated.
func TestAppend(t *testing.T) {
	for want, got := range map[string][]byte{
		`{"prefill_worker_id":7,"prefill_dp_rank":1,"decode_worker_id":18446744073709551615,"decode_dp_rank":4294967295}`: MemberOf("", Workers{7, 1, math.MaxUint64, math.MaxUint32}).Value,
		`{"request_received_ms":0,"router_queue_depth":0}`:                                                                MemberOf("", Timing{}).Value,
		`{"request_received_ms":1795000000000,"prefill_wait_time_ms":0.5,"prefill_time_ms":12,"ttft_ms":12.5,"total_time_ms":100.25,"kv_hit_rate":0.75,"router_queue_depth":3}`: MemberOf("", Timing{
			1795000000000, new(0.5), new(12.0), new(12.5), new(100.25), new(0.75), 3,
		}).Value,
		`{"worker_id":{"decode_worker_id":7},"token_ids":[1]}`: AppendObject(nil, []Member{{NameWorkerID, []byte(`{"decode_worker_id":7}`)}, {NameTokenIDs, []byte(`[1]`)}}),
		"event: token_ids\n: [1,2,3]\n\n":                      AppendAnnotation(nil, NameTokenIDs, []byte("[1,2,3]")),
		"event: request_id\n: \"a\\\"b\\nc\"\n\n":              AppendAnnotation(nil, NameRequestID, rawjson.AppendString(nil, "a\"b\nc")),
		"event: a b\n: {   } \n\n":                             AppendAnnotation(nil, "a b", []byte("{ \r\n}\n")),
	} {
		if string(got) != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
