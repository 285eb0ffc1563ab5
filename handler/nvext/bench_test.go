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

// Parse allocates the same however many tokens there are.
func TestParseAllocations(t *testing.T) {
	count := func(raw []byte) float64 {
		return testing.AllocsPerRun(20, func() {
			if _, err := Parse(raw, Options{}); err != nil {
				t.Fatal(err)
			}
		})
	}
	if few, many := count(withTokens(1)), count(withTokens(100_000)); many > few {
		t.Errorf("%v allocations, %v with many tokens", few, many)
	}
}

func BenchmarkParse(b *testing.B) {
	for _, n := range []int{3, 100_000} {
		b.Run(strconv.Itoa(n)+"Tokens", func(b *testing.B) {
			raw := withTokens(n)
			b.SetBytes(int64(len(raw)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Parse(raw, Options{}); err != nil {
					b.Fatal(err)
				}
			}
		})
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
