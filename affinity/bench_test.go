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

// BenchmarkGet gets bindings and slides their time to live.
func BenchmarkGet(b *testing.B) {
	for _, n := range []int{1_000, 100_000} {
		b.Run(fmt.Sprintf("%dsessions", n), func(b *testing.B) {
			r, sessions := filled(b, n)
			for i := 0; b.Loop(); i++ {
				r.Get(sessions[i%len(sessions)])
			}
		})
	}
}

// BenchmarkBind binds sessions that are new, into a store with room.
func BenchmarkBind(b *testing.B) {
	r := open(b, Options{MaxSessions: 10_000_000, MaxBytes: 8 << 30})
	sessions := make([]string, 0, 1<<20)
	for i := range cap(sessions) {
		sessions = append(sessions, fmt.Sprintf("session-%028d", i))
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		session := sessions[i%len(sessions)]
		if i >= len(sessions) {
			b.StopTimer()
			remove(r, session)
			b.StartTimer()
		}
		if _, ok, err := r.CompareAndSwap(session, 0, on(1), time.Hour, RouterOnly); !ok || err != nil {
			b.Fatal(ok, err)
		}
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
