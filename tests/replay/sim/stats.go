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
)

// Result is what a cell showed, without the warm-up.
type Result struct {
	Policy    string
	Speed     float64
	Knowledge string
	Figures
	// Requests is how many requests the figures are of.
	Requests int
	// PolicyFaults are choices that the policy spoilt. Expired are leases that
	// expired before their request ended. Untracked are prompts that did not go
	// into the cache model whole.
	PolicyFaults uint64
	Expired      uint64
	Untracked    uint64
	// Spread is the highest mean TTFT of several seeds over the lowest, less 1.
	Spread float64
	// Relative are the figures divided by those of the first policy at this speed.
	Relative *Figures
}

// Figures are the figures of a cell. Times are in milliseconds.
type Figures struct {
	MeanTTFT float64
	P50TTFT  float64
	P99TTFT  float64
	MeanE2E  float64
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
		MeanTTFT: div(f.MeanTTFT, by.MeanTTFT), P50TTFT: div(f.P50TTFT, by.P50TTFT),
		P99TTFT: div(f.P99TTFT, by.P99TTFT), MeanE2E: div(f.MeanE2E, by.MeanE2E),
		HitRatio: div(f.HitRatio, by.HitRatio),
	}
}

// tally gathers the figures. They count from a request or from a time on.
type tally struct {
	from     int
	fromTime time.Duration

	ttft          []float64
	e2e           float64
	prompt, saved int64
}

func (s *tally) begin(r *replay) {
	if r.Trace.Closed {
		s.fromTime = min(warmUpClosed, r.scaled(r.Trace.Duration()/4))
	} else {
		s.from = int(warmUp * float64(len(r.Trace.Requests)))
	}
}

func (s *tally) ended(now time.Duration, n int, q *request) {
	if n < s.from || q.arrived < s.fromTime {
		return
	}
	s.ttft = append(s.ttft, milliseconds(q.first-q.arrived))
	s.e2e += milliseconds(now - q.arrived)
	s.prompt += int64(q.In)
	s.saved += int64(q.Cached)
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func (r *replay) result() *Result {
	s, totals := &r.tally, r.scheduler.Stats()
	res := &Result{
		Policy: r.Policy, Speed: r.Speed, Knowledge: "approximate", Requests: len(s.ttft),
		PolicyFaults: totals.PolicyFaults, Expired: totals.Expired, Untracked: totals.Untracked,
	}
	if r.view.Exact && (r.spec.Kind.Exact || r.spec.Reference) {
		res.Knowledge = "exact"
	}
	slices.Sort(s.ttft)
	sum := 0.0
	for _, t := range s.ttft {
		sum += t
	}
	n := float64(len(s.ttft))
	res.MeanTTFT, res.MeanE2E = sum/n, s.e2e/n
	res.P50TTFT, res.P99TTFT = stats.Percentile(s.ttft, 0.5), stats.Percentile(s.ttft, 0.99)
	res.HitRatio = float64(s.saved) / float64(s.prompt)
	return res
}

// Mean returns the geometric means of the figures of one cell with several seeds,
// and how far its mean TTFTs are apart.
func Mean(seeds []*Result) *Result {
	m := *seeds[0]
	m.Relative = nil
	lowest, highest := m.MeanTTFT, m.MeanTTFT
	for _, r := range seeds[1:] {
		lowest, highest = min(lowest, r.MeanTTFT), max(highest, r.MeanTTFT)
		m.PolicyFaults += r.PolicyFaults
		m.Expired += r.Expired
		m.Untracked += r.Untracked
	}
	figures := m.fields()
	for i := range figures {
		*figures[i] = Geomean(len(seeds), func(k int) float64 { return *seeds[k].fields()[i] })
	}
	m.Spread = highest/lowest - 1
	return &m
}

// fields returns all figures.
func (f *Figures) fields() [5]*float64 {
	return [...]*float64{&f.MeanTTFT, &f.P50TTFT, &f.P99TTFT, &f.MeanE2E, &f.HitRatio}
}

// Geomean returns the geometric mean of n values; 0 if one of them is 0.
func Geomean(n int, value func(i int) float64) float64 {
	if n == 1 {
		return value(0)
	}
	sum := 0.0
	for i := range n {
		sum += math.Log(value(i))
	}
	return math.Exp(sum / float64(n))
}
