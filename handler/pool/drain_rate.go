package pool

import (
	"math"
	"time"
)

// drainRate is how fast requests have left the queue, while there was one.
type drainRate struct {
	served float64 // decayed to at
	busy   float64 // seconds, decayed as well
	at     time.Time
}

// rateMemory is the time of queueing in which older counts decay to a third.
const rateMemory = 10 * time.Second

// pass lets the time go on until t. waited says that requests waited meanwhile.
func (r *drainRate) pass(t time.Time, waited bool) {
	if d := t.Sub(r.at); waited && d > 0 {
		keep := math.Exp(-float64(d) / float64(rateMemory))
		r.served *= keep
		r.busy = r.busy*keep + d.Seconds()
	}
	r.at = t
}

// Bounds of what clients are told to wait, in seconds.
const minRetryAfter, maxRetryAfter = 1, 60

// RetryAfter returns the seconds in which the requests that wait now will have been
// served, or unknown if the rate is not known.
func (q *queue) RetryAfter(unknown time.Duration) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.count(time.Now(), 0)
	seconds := unknown.Seconds()
	if r := q.rate; r.served > 0 && r.busy > 0 {
		seconds = float64(q.Length.Load()+1) * r.busy / r.served
	}
	return int(min(max(math.Ceil(seconds), minRetryAfter), maxRetryAfter))
}
