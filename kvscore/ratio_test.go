package kvscore

import (
	"math"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

func TestRatiosLearn(t *testing.T) {
	var r Ratios
	if got := r.BytesPerToken("m"); got != DefaultBytesPerToken || r.Known("m") {
		t.Errorf("unknown model: %v", got)
	}
	r.Learn("m", 93, 31)        // too short
	r.Learn("m", 1_000_000, 40) // no tokenizer does that
	r.Learn("m", 40, 100)
	r.Learn("m", -4000, 1000)
	if got := r.BytesPerToken("m"); got != DefaultBytesPerToken || r.Known("m") {
		t.Errorf("learned from nonsense: %v", got)
	}
	for range 50 {
		r.Learn("m", 3000, 1000)
	}
	if got := r.BytesPerToken("m"); math.Abs(got-3) > 0.01 || !r.Known("m") {
		t.Errorf("ratio %v, want 3", got)
	}
	if got := r.BytesPerToken("new"); math.Abs(got-3) > 0.01 || r.Known("new") {
		t.Errorf("an unknown model has %v, want 3 as all others", got)
	}
}

// Names come from clients: those of long ago make room for those in use, and a
// name takes no memory of its own.
func TestRatiosForgetTheLeastRecentlyUsed(t *testing.T) {
	var r Ratios
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	long := strings.Repeat("x", 1<<20)
	for i := range 3 * maxRatios {
		if i < 100 {
			r.Learn(long+strconv.Itoa(i), 4000, 1000)
		}
		r.Learn(strconv.Itoa(i), 4000, 1000)
		if i == 0 {
			r.Learn("in use", 3000, 1000)
		} else if got := r.BytesPerToken("in use"); got != 3 {
			t.Fatalf("the model in use has %v after %d others", got, i)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 4<<20 {
		t.Errorf("%d bytes are kept", grown)
	}
	if r.Known("0") || !r.Known(strconv.Itoa(3*maxRatios-1)) || len(r.models) != maxRatios {
		t.Errorf("the oldest known %v, the newest %v, %d in all", r.Known("0"), r.Known(strconv.Itoa(3*maxRatios-1)), len(r.models))
	}
	r.Learn("a late comer", 3000, 1000)
	if !r.Known("a late comer") {
		t.Error("a full table learns nothing")
	}
	if n := testing.AllocsPerRun(100, func() { r.BytesPerToken("in use") }); n != 0 {
		t.Errorf("BytesPerToken allocates %v times", n)
	}
	runtime.KeepAlive(&r)
}
