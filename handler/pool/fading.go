package pool

import (
	"math"
	"time"
)

// fading counts events, and some among them. An event as old as the memory counts a third.
type fading struct {
	all, some float64
	at        time.Time
}

// to fades the counts until now.
func (f *fading) to(now time.Time, memory time.Duration) *fading {
	if age := now.Sub(f.at); age > 0 {
		keep := math.Exp(-float64(age) / float64(memory))
		f.all, f.some, f.at = f.all*keep, f.some*keep, now
	}
	return f
}
