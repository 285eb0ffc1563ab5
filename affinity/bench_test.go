package affinity

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
)

// numberedKey returns a key as a keyed hash would make it.
func numberedKey(i int) (k Key) {
	rnd := rand.NewPCG(1, uint64(i)) //nolint:gosec // not negative
	binary.LittleEndian.PutUint64(k[:8], rnd.Uint64())
	binary.LittleEndian.PutUint64(k[8:], rnd.Uint64())
	return k
}

func numbered(n int) []Key {
	keys := make([]Key, n)
	for i := range keys {
		keys[i] = numberedKey(i)
	}
	return keys
}

func filled(b *testing.B, n int) (*Bindings, []Key) {
	b.Helper()
	r := open(b, Options{MaxSessions: n})
	keys := numbered(n)
	for _, k := range keys {
		if _, ok, err := r.Bind(k, 0, want(on(1), time.Hour, EngineBacked)); !ok || err != nil {
			b.Fatal(ok, err)
		}
	}
	// As a store that has been in use for a while.
	r.sweep()
	for _, k := range keys {
		r.Peek(k)
	}
	runtime.GC()
	b.ReportAllocs()
	b.ResetTimer()
	return r, keys
}

// BenchmarkBindFull binds sessions that are new in a full store, so that each Bind evicts.
func BenchmarkBindFull(b *testing.B) {
	r, _ := filled(b, 1_000_000)
	rnd := rand.New(rand.NewPCG(3, 4))
	for b.Loop() {
		var key Key
		binary.LittleEndian.PutUint64(key[:8], rnd.Uint64())
		if _, _, err := r.Bind(key, 0, want(on(1), time.Hour, RouterOnly)); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkSweep sweeps a million bindings of which none is overdue. It reports the longest
// time for a part of them, for which a sweep holds the lock.
func BenchmarkSweep(b *testing.B) {
	r, _ := filled(b, 1_000_000)
	var longest time.Duration
	buf := make([]*entry, 0, chunkSize)
	for b.Loop() {
		now := r.now()
		for end := r.Len(); end > 0; {
			began := time.Now()
			buf, end = r.roster.chunk(end, now, true, buf[:0])
			longest = max(longest, time.Since(began))
		}
	}
	b.ReportMetric(float64(longest.Microseconds()), "µs-pause")
}

// BenchmarkTurn is what a turn of a bound session costs: begin, find, end.
func BenchmarkTurn(b *testing.B) {
	r, keys := filled(b, 1_000_000)
	for b.Loop() {
		var u Use
		r.Begin(&u, keys[rand.IntN(len(keys))])
		bound, _, _ := u.Find(context.Background(), Patience)
		u.End(bound.Version)
	}
}
