package body

import (
	"testing"
	"time"
)

// TestBurstIsReportedOnceItIsOver checks at usage as it rises and falls.
func TestBurstIsReportedOnceItIsOver(t *testing.T) {
	const mib = 1 << 20
	for name, v := range map[string]struct {
		peaks []int64 // MiB, of one look after the other
		fell  []int   // the looks at which a burst is over
	}{
		"nothing":              {[]int64{0, 0, 0, 0}, nil},
		"one burst":            {[]int64{0, 2000, 0, 0, 0, 0}, []int{3}},
		"less afterwards":      {[]int64{2000, 900, 900, 900}, []int{2}},
		"small burst":          {[]int64{60, 0, 0, 0}, nil},
		"steady":               {[]int64{1000, 900, 1100, 600, 700, 1000}, nil},
		"a pause of one look":  {[]int64{1000, 0, 1000, 0, 1000, 0, 1000}, nil},
		"two bursts":           {[]int64{500, 0, 0, 0, 500, 0, 0, 0}, []int{2, 6}},
		"steps down":           {[]int64{1000, 400, 400, 100, 100, 100}, []int{2, 4}},
		"slow fall":            {[]int64{1000, 800, 600, 500, 400, 300, 250, 200, 150, 150}, []int{4, 7}},
		"back, and still more": {[]int64{1000, 0, 0, 100, 2000, 2000, 0, 0}, []int{2, 7}},
	} {
		var u usage
		at, next := time.Now(), 0
		for i, peak := range v.peaks {
			u.add(peak * mib)
			u.add(-peak * mib)
			at = at.Add(10 * time.Second)
			want := next < len(v.fell) && v.fell[next] == i
			if want {
				next++
			}
			if got := u.fell(at); got != want {
				t.Errorf("%s: look %d: %v", name, i, got)
			}
			if u.fell(at.Add(10 * time.Second / 2)) {
				t.Errorf("%s: look %d: another pool looked too", name, i)
			}
		}
	}
	var held usage
	held.add(500 * mib)
	for i := range 5 {
		if held.fell(time.Now().Add(time.Duration(i) * 10 * time.Second)) {
			t.Error("what is held all the time is taken for a burst")
		}
	}
}
