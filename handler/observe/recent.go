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

	timeSteps = 40  // of Times
	timeStep  = 1.4 // from one to the next; the first is 1 ms
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
	// Active are the slots in which attempts have ended.
	Active int64
	// Attempts that have ended, those of them with which their requests ended, and those that failed by the
	// worker's fault.
	Attempts, Requests, Failed int64
	// Tokens of prompts, of answers that report cached tokens.
	Prompt, Predicted, Cached int64
	Reports                   int64 // number of such answers

	FirstTokens Times // of streams, since the choice of the worker
	Plain       Times // of the other answers: until their end
	plain       time.Duration
	plainTokens int64
	Paces       int64
	paces       time.Duration // sum
}

// Times are times, to about 20 %.
type Times struct {
	N     int64
	steps [timeSteps]uint32
}

func (t *Times) note(d time.Duration) {
	step := math.Log(float64(d)/float64(time.Millisecond)) / math.Log(timeStep)
	t.N++
	t.steps[int(min(max(step, 0), timeSteps-1))]++
}

func (t *Times) add(o *Times) {
	if t.N += o.N; o.N > 0 {
		for i, n := range o.steps {
			t.steps[i] += n
		}
	}
}

// Quantile returns a quantile, 0 without any times.
func (t *Times) Quantile(q float64) time.Duration {
	if t.N == 0 {
		return 0
	}
	rank := q * float64(t.N)
	for i, n := range t.steps {
		if rank <= float64(n) && n > 0 {
			return time.Duration(float64(time.Millisecond) * math.Pow(timeStep, float64(i)+rank/float64(n)))
		}
		rank -= float64(n)
	}
	return time.Duration(float64(time.Millisecond) * math.Pow(timeStep, timeSteps))
}

// SlotOf returns the number of the slot of a time.
func SlotOf(t time.Time) int64 { return t.UnixNano() / int64(SlotTime) }

// note records something in the slot of a time.
func (r *Recent) note(t time.Time, in func(*Sums)) {
	n := SlotOf(t)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.slots == nil {
		r.slots = make([]Sums, RecentSlots)
	}
	s := &r.slots[n%RecentSlots]
	if s.Slot != n {
		*s = Sums{Slot: n}
	}
	in(s)
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
	s.Active, s.Attempts, s.Requests, s.Failed = s.Active+o.Active, s.Attempts+o.Attempts, s.Requests+o.Requests, s.Failed+o.Failed
	s.Prompt, s.Predicted, s.Cached, s.Reports = s.Prompt+o.Prompt, s.Predicted+o.Predicted, s.Cached+o.Cached, s.Reports+o.Reports
	s.Paces, s.paces = s.Paces+o.Paces, s.paces+o.paces
	s.plain, s.plainTokens = s.plain+o.plain, s.plainTokens+o.plainTokens
	s.FirstTokens.add(&o.FirstTokens)
	s.Plain.add(&o.Plain)
}

// Pace returns the mean time between the chunks of answers, 0 without any.
func (s *Sums) Pace() time.Duration {
	if s.Paces == 0 {
		return 0
	}
	return s.paces / time.Duration(s.Paces)
}

// PlainPace returns the time of plain answers for each of their tokens, 0 if unknown.
func (s *Sums) PlainPace() time.Duration {
	if s.plainTokens == 0 {
		return 0
	}
	return s.plain / time.Duration(s.plainTokens)
}
