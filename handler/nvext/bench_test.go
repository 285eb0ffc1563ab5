package nvext

import (
	"strconv"
	"strings"
	"testing"
)

// withTokens returns an nvext with every field and that many token ids.
func withTokens(n int) []byte {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = uint32(i * 7919 % 128256)
	}
	return []byte(strings.Replace(every, "[0,1,4294967295]", string(AppendTokens(nil, ids)), 1))
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
