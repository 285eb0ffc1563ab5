package body

import (
	"bytes"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
)

// BenchmarkReadBody reads bodies that have arrived whole.
func BenchmarkReadBody(b *testing.B) {
	for _, kib := range []int{1, 15, 20, 60, 250, 600, 3000} {
		b.Run(fmt.Sprintf("%dKiB", kib), func(b *testing.B) {
			body, held := noise(kib<<10), new(atomic.Int64)
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				all, _, err := readBody(io.NopCloser(bytes.NewReader(body)), int64(len(body)), 64<<20, held)
				if err != nil || len(all.Data) != len(body) {
					b.Fatal(err)
				}
				all.free()
			}
		})
	}
}
