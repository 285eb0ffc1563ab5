package observe

import (
	"math"
	"time"
)

// Decaying counts events, and some among them. An event as old as the memory counts a third.
type Decaying struct {
	All, Some float64
	at        time.Time
}

// To decays the counts until now.
func (d *Decaying) To(now time.Time, memory time.Duration) *Decaying {
	if age := now.Sub(d.at); age > 0 {
		keep := math.Exp(-float64(age) / float64(memory))
		d.All, d.Some, d.at = d.All*keep, d.Some*keep, now
	}
	return d
}
