package affinity

import (
	"fmt"
	"testing"
	"time"
)

func filled(b *testing.B, n int) (*Ristretto, []string) {
	b.Helper()
	r := open(b, Options{MaxSessions: n})
	sessions := make([]string, n)
	for i := range sessions {
		sessions[i] = fmt.Sprintf("session-%028d", i)
		mustPut(b, r, sessions[i], 1, time.Hour, EngineBacked)
	}
	b.ReportAllocs()
	b.ResetTimer()
	return r, sessions
}

func BenchmarkGet(b *testing.B) {
	r, sessions := filled(b, 100_000)
	for i := 0; b.Loop(); i++ {
		r.Get(sessions[i%len(sessions)])
	}
}

func BenchmarkGetParallel(b *testing.B) {
	r, sessions := filled(b, 100_000)
	b.RunParallel(func(pb *testing.PB) {
		for i := 0; pb.Next(); i++ {
			r.Get(sessions[i%len(sessions)])
		}
	})
}

func BenchmarkPutExisting(b *testing.B) {
	r, sessions := filled(b, 100_000)
	for i := 0; b.Loop(); i++ {
		if _, err := r.Put(sessions[i%len(sessions)], on(1), time.Hour, EngineBacked); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPutNew puts into a full store, so that each put evicts.
func BenchmarkPutNew(b *testing.B) {
	r, _ := filled(b, 100_000)
	for i := 0; b.Loop(); i++ {
		if _, err := r.Put(fmt.Sprintf("new-%032d", i), on(1), time.Hour, RouterOnly); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPutNewParallel(b *testing.B) {
	r, _ := filled(b, 100_000)
	b.RunParallel(func(pb *testing.PB) {
		for i := 0; pb.Next(); i++ {
			if _, err := r.Put(fmt.Sprintf("new-%p-%020d", pb, i), on(1), time.Hour, RouterOnly); err != nil {
				b.Fatal(err)
			}
		}
	})
}
