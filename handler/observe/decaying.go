package observe

import (
	"math"
	"time"
)

// Decaying counts events, and sums something of each, such as 1 for an error. An event as old as the
// memory counts a third.
type Decaying struct {
	Count, Sum float64
	decayedAt  time.Time
}

// To decays the counts until now.
func (d *Decaying) To(now time.Time, memory time.Duration) *Decaying {
	if age := now.Sub(d.decayedAt); age > 0 {
		keep := math.Exp(-float64(age) / float64(memory))
		d.Count, d.Sum, d.decayedAt = d.Count*keep, d.Sum*keep, now
	}
	return d
}
