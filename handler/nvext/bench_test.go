package nvext

import (
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// withTokens returns an nvext with every field and that many token ids.
func withTokens(n int) []byte {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = uint32(i * 7919 % 128256)
	}
	return []byte(strings.Replace(every, "[0,1,4294967295]", string(AppendTokens(nil, ids)), 1))
}

// Parse allocates the same however many tokens there are, and one list more if
// the options ask for them.
func TestParseAllocations(t *testing.T) {
	count := func(raw []byte, o Options) float64 {
		return testing.AllocsPerRun(20, func() {
			if _, err := Parse(raw, o); err != nil {
				t.Fatal(err)
			}
		})
	}
	few, many := count(withTokens(1), Options{}), count(withTokens(100_000), Options{})
	asked := count(withTokens(100_000), Options{Tokens: true})
	if many > few || asked > few+1 {
		t.Errorf("%v allocations, %v with many tokens, %v where they are asked for", few, many, asked)
	}
	if n := count([]byte(`{"backend_instance_id":1,"dp_rank":0,"annotations":["request_id"],"extra_fields":["timing"],"agent_hints":{"priority":1},"router":{"itl_target":1}}`), Options{}); n > 0 {
		t.Errorf("%v allocations for an nvext without texts", n)
	}
}

func BenchmarkParse(b *testing.B) {
	for _, n := range []int{3, 100_000} {
		for _, keep := range []bool{false, true} {
			b.Run(strconv.Itoa(n)+"Tokens/Keep="+strconv.FormatBool(keep), func(b *testing.B) {
				raw := withTokens(n)
				b.SetBytes(int64(len(raw)))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := Parse(raw, Options{Tokens: keep}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

func BenchmarkCuts(b *testing.B) {
	raw := []byte(every)
	var cuts []rawjson.Edit
	b.ReportAllocs()
	for b.Loop() {
		cuts = Cuts(cuts[:0], raw, 0, false)
	}
}

func BenchmarkEditChunk(b *testing.B) {
	chunk := []byte(`data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1795000000,"model":"meta-llama/Llama-3.3-70B-Instruct","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n")
	f, a := rawjson.Framer{Edits: true}, marks
	b.SetBytes(int64(len(chunk)))
	b.ReportAllocs()
	for b.Loop() {
		chunked(&f, &a, chunk, false)
	}
}
