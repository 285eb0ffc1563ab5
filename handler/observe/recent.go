package observe

import (
	"math"
	"sync"
	"time"
)

const (
	// SlotTime is the length of one of the slots of [Recent].
	SlotTime = 10 * time.Second
	// RecentSlots is how many slots there are: five minutes.
	RecentSlots = 30

	ttftSteps = 40  // of the times to first token
	ttftStep  = 1.4 // from one to the next; the first is 1 ms
)

// Recent is what a worker did in the last minutes. Metrics have sums only, which say nothing
// without a Prometheus.
type Recent struct {
	mu    sync.Mutex
	slots []Sums // nil before the first attempt; a ring by number
}

// Sums are what a worker did in a slot, or in several.
type Sums struct {
	Slot int64 // its number: the time in units of SlotTime
	// Attempts that have ended, and those of them that failed by the worker's fault.
	Attempts, Failed int64
	// Tokens of prompts, of answers that report cached tokens.
	Prompt, Predicted, Cached int64
	Reports                   int64 // number of such answers

	FirstTokens int64
	ttft        [ttftSteps]uint32
	Paces       int64
	paces       time.Duration // sum
}

// SlotOf returns the number of the slot of a time.
func SlotOf(t time.Time) int64 { return t.UnixNano() / int64(SlotTime) }

// open locks r, and returns the slot of a time. The caller unlocks r.
func (r *Recent) open(t time.Time) *Sums {
	n := SlotOf(t)
	r.mu.Lock()
	if r.slots == nil {
		r.slots = make([]Sums, RecentSlots)
	}
	s := &r.slots[n%RecentSlots]
	if s.Slot != n {
		*s = Sums{Slot: n}
	}
	return s
}

func (r *Recent) attempt(t time.Time, failed bool) {
	s := r.open(t)
	defer r.mu.Unlock()
	s.Attempts++
	if failed {
		s.Failed++
	}
}

func (r *Recent) firstToken(t time.Time, after time.Duration) {
	step := math.Log(float64(after)/float64(time.Millisecond)) / math.Log(ttftStep)
	s := r.open(t)
	defer r.mu.Unlock()
	s.FirstTokens++
	s.ttft[int(min(max(step, 0), ttftSteps-1))]++
}

func (r *Recent) pace(t time.Time, mean time.Duration) {
	s := r.open(t)
	defer r.mu.Unlock()
	s.Paces++
	s.paces += mean
}

func (r *Recent) compared(t time.Time, prompt, predicted, cached int64) {
	s := r.open(t)
	defer r.mu.Unlock()
	s.Reports++
	s.Prompt, s.Predicted, s.Cached = s.Prompt+prompt, s.Predicted+predicted, s.Cached+cached
}

// Add adds to sum what the worker did in all slots, and to each of line what it did in that slot. The
// slots of line are consecutive, and have their numbers.
func (r *Recent) Add(now time.Time, sum *Sums, line []Sums) {
	last := SlotOf(now)
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.slots {
		s := &r.slots[i]
		if s.Slot <= last-RecentSlots {
			continue
		}
		sum.Add(s)
		if len(line) > 0 && s.Slot >= line[0].Slot && s.Slot < line[0].Slot+int64(len(line)) {
			line[s.Slot-line[0].Slot].Add(s)
		}
	}
}

// Add adds other sums.
func (s *Sums) Add(o *Sums) {
	s.Attempts, s.Failed = s.Attempts+o.Attempts, s.Failed+o.Failed
	s.Prompt, s.Predicted, s.Cached, s.Reports = s.Prompt+o.Prompt, s.Predicted+o.Predicted, s.Cached+o.Cached, s.Reports+o.Reports
	s.Paces, s.paces, s.FirstTokens = s.Paces+o.Paces, s.paces+o.paces, s.FirstTokens+o.FirstTokens
	if o.FirstTokens > 0 {
		for i, n := range o.ttft {
			s.ttft[i] += n
		}
	}
}

// TTFT returns a quantile of the times to first token, 0 without any. It is exact to about 20 %.
func (s *Sums) TTFT(q float64) time.Duration {
	if s.FirstTokens == 0 {
		return 0
	}
	rank := q * float64(s.FirstTokens)
	for i, n := range s.ttft {
		if rank <= float64(n) && n > 0 {
			return time.Duration(float64(time.Millisecond) * math.Pow(ttftStep, float64(i)+rank/float64(n)))
		}
		rank -= float64(n)
	}
	return time.Duration(float64(time.Millisecond) * math.Pow(ttftStep, ttftSteps))
}

// Pace returns the mean time between the chunks of answers, 0 without any.
func (s *Sums) Pace() time.Duration {
	if s.Paces == 0 {
		return 0
	}
	return s.paces / time.Duration(s.Paces)
}
