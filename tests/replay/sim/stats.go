package sim

import (
	"math"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/stats"
)

const (
	// warmUp is the share of the requests of an open loop that do not count, the
	// first ones. Those of a closed one count after warmUpClosed, or after a quarter
	// of the trace's duration if that is less.
	warmUp       = 0.1
	warmUpClosed = 90 * time.Second
	// goodTTFT and goodGap bound the time to the first token and the mean time between two
	// tokens of a good answer.
	goodTTFT = 2 * time.Second
	goodGap  = 50 * time.Millisecond
)

// Result is what a cell showed, without the warm-up.
type Result struct {
	Figures
	// Split is the share of the requests that were split.
	Split float64
	// Places is the engine of each request; several seeds have none.
	Places []int
	// Outcomes are those of each request; several seeds have none.
	Outcomes []Outcome
	// Relative are the figures divided by those of the first policy in this cell.
	Relative *Figures
}

// Outcome is what became of a request. Times are since the beginning.
type Outcome struct {
	Arrived, First, Ended time.Duration
	Refused               bool
	// Work is the time of its tokens, without what each step of an engine takes anyway, in milliseconds.
	Work float64
}

// Figures are the figures of a cell. Times are in milliseconds.
type Figures struct {
	MeanTTFT float64
	P99TTFT  float64
	P999TTFT float64
	// MeanGap is the mean time between two tokens of an answer.
	MeanGap float64
	// MeanE2E is the mean time to the end of the answer.
	MeanE2E float64
	// Good is the share of the requests within goodTTFT and goodGap.
	Good float64
	// HitRatio is the share of the prompt tokens that engines did not compute.
	HitRatio float64
}

// Over returns each figure divided by that of another cell; 0 where that is 0.
func (f Figures) Over(by Figures) *Figures {
	div := func(a, b float64) float64 {
		if b == 0 {
			return 0
		}
		return a / b
	}
	return &Figures{
		div(f.MeanTTFT, by.MeanTTFT), div(f.P99TTFT, by.P99TTFT), div(f.P999TTFT, by.P999TTFT), div(f.MeanGap, by.MeanGap),
		div(f.MeanE2E, by.MeanE2E), div(f.Good, by.Good), div(f.HitRatio, by.HitRatio),
	}
}

// tally gathers the figures. They count from a request or from a time on.
type tally struct {
	from     int
	fromTime time.Duration
	counted  []bool // nil: all

	ttft          []float64
	e2e, decoding float64
	gaps, good    int
	prompt, saved int64
}

func (s *tally) begin(r *replay) {
	s.counted = r.Counted
	switch {
	case r.Trace.AtOnce, r.Counted != nil:
	case r.Trace.Closed:
		s.fromTime = min(warmUpClosed, r.scaled(r.Trace.Duration()/4))
	default:
		s.from = int(warmUp * float64(len(r.Trace.Requests)))
	}
}

func (s *tally) ended(now time.Duration, n int, q *request) {
	if n < s.from || q.arrived < s.fromTime || s.counted != nil && !s.counted[n] {
		return
	}
	s.ttft = append(s.ttft, milliseconds(q.first-q.arrived))
	s.e2e += milliseconds(now - q.arrived)
	s.decoding += milliseconds(now - q.first)
	s.gaps += q.Out - 1
	if q.first-q.arrived <= goodTTFT && now-q.first <= time.Duration(q.Out-1)*goodGap {
		s.good++
	}
	s.prompt += int64(q.In)
	s.saved += int64(q.Cached)
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func (r *replay) result() *Result {
	s := &r.tally
	slices.Sort(s.ttft)
	sum := 0.0
	for _, t := range s.ttft {
		sum += t
	}
	n := float64(len(s.ttft))
	places, outcomes := make([]int, len(r.requests)), make([]Outcome, len(r.requests))
	for i := range r.requests {
		q := &r.requests[i]
		places[i] = q.at
		outcomes[i] = Outcome{q.arrived, q.first, q.ended, q.refused, r.work(q)}
	}
	return &Result{
		Places: places, Outcomes: outcomes,
		Figures: Figures{
			MeanTTFT: sum / n, P99TTFT: stats.Percentile(s.ttft, 0.99), P999TTFT: stats.Percentile(s.ttft, 0.999), MeanGap: s.decoding / float64(max(1, s.gaps)),
			MeanE2E: s.e2e / n, Good: float64(s.good) / n, HitRatio: float64(s.saved) / float64(s.prompt),
		},
		Split: float64(r.split) / float64(len(r.requests)),
	}
}

// Mean returns the geometric means of the figures of one cell with several seeds.
func Mean(seeds []*Result) *Result {
	if len(seeds) == 1 {
		return seeds[0]
	}
	mean, split := new(Result), 0.0
	for _, f := range []func(*Figures) *float64{
		func(f *Figures) *float64 { return &f.MeanTTFT }, func(f *Figures) *float64 { return &f.P99TTFT },
		func(f *Figures) *float64 { return &f.P999TTFT },
		func(f *Figures) *float64 { return &f.MeanGap }, func(f *Figures) *float64 { return &f.MeanE2E },
		func(f *Figures) *float64 { return &f.Good }, func(f *Figures) *float64 { return &f.HitRatio },
	} {
		values := make([]float64, len(seeds))
		for i, r := range seeds {
			values[i] = *f(&r.Figures)
		}
		*f(&mean.Figures) = Geomean(values)
	}
	for _, r := range seeds {
		split += r.Split / float64(len(seeds))
	}
	mean.Split = split
	return mean
}

// Geomean returns the geometric mean of values; 0 if there are none or one of them is 0.
func Geomean(values []float64) float64 {
	switch len(values) {
	case 0:
		return 0
	case 1:
		return values[0]
	}
	sum := 0.0
	for _, v := range values {
		sum += math.Log(v)
	}
	return math.Exp(sum / float64(len(values)))
}

// work returns the time of a request's tokens, without that which each step of an engine takes anyway.
func (r *replay) work(q *request) float64 {
	n, k := float64(q.In-q.Cached), float64(q.Cached)
	return r.Engine.PerToken*(n+float64(q.Out)) + r.Engine.Attention*n*(k+n/2)
}
