package main

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"
)

func TestSpreadIsMedianMinMax(t *testing.T) {
	for _, c := range []struct {
		in   []figure
		want spread
	}{
		{[]figure{3}, spread{3, 3, 3}},
		{[]figure{3, 1, 2}, spread{2, 1, 3}},
		{[]figure{4, 1, 2, 9}, spread{3, 1, 9}},
		{[]figure{unknown, 5, unknown, 1, 2}, spread{2, 1, 5}},
	} {
		if got := spreadOf(c.in); got != c.want {
			t.Errorf("spreadOf(%v) = %v, want %v", c.in, got, c.want)
		}
	}
	if s := spreadOf([]figure{unknown}); s.Median.known() {
		t.Errorf("the median of nothing known is %v", s.Median)
	}
}

func TestRatiosAreOfTheSameRound(t *testing.T) {
	a := map[int]figure{0: 2, 1: 30, 2: 8, 3: unknown, 4: 7}
	b := map[int]figure{0: 1, 1: 10, 2: 2, 3: 1, 5: 1}
	got := spreadOf(ratios(a, b))
	if want := (spread{3, 2, 4}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	if r := ratios(map[int]figure{0: 1}, map[int]figure{0: 0}); len(r) != 0 {
		t.Errorf("ratio to nothing: %v", r)
	}
}

func TestPercentileIsNearestRank(t *testing.T) {
	var sorted []time.Duration
	for i := range 1000 {
		sorted = append(sorted, time.Duration(i+1)*time.Millisecond)
	}
	for q, want := range map[float64]figure{0: 1, 0.5: 500, 0.99: 990, 0.999: 999, 1: 1000} {
		if got := percentile(sorted, q); got != want {
			t.Errorf("percentile %g = %v, want %v", q, got, want)
		}
	}
	if got := percentile(sorted[:1], 0.99); got != 1 {
		t.Errorf("of one: %v", got)
	}
	if percentile(nil, 0.5).known() {
		t.Error("of none: known")
	}
}

func TestUnknownFiguresAreShownAsUnknown(t *testing.T) {
	out, err := json.Marshal([]figure{unknown, 1.5, figure(math.Inf(1))})
	if err != nil || string(out) != "[null,1.5,null]" {
		t.Errorf("got %s, %v", out, err)
	}
	for f, want := range map[figure]string{0.03456: "0.035", 0.3456: "0.346", 3.456: "3.46", 34.56: "34.6", 34567: "34567"} {
		if got := f.text(3); got != want {
			t.Errorf("%v is %q, want %q", float64(f), got, want)
		}
	}
	if unknown.text(3) != "–" {
		t.Errorf("unknown is %q", unknown.text(3))
	}
}

func TestReportMarksErrors(t *testing.T) {
	r := report{contenders: []string{"caddy", "other"}, cells: []string{"c"}, rounds: 2}
	for round, cpu := range []figure{1, 2} {
		r.samples = append(r.samples,
			&sample{Contender: "caddy", Cell: "c", Round: round, CPU: cpu, Rate: 10, Peak: unknown},
			&sample{Contender: "other", Cell: "c", Round: round, CPU: 3 * cpu, Rate: 10, Peak: unknown})
	}
	r.samples[3].Errors, r.samples[3].Error = 7, "status 502"
	for _, markdown := range []bool{false, true} {
		var b strings.Builder
		if err := r.write(&b, markdown); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"1.50 (1.00..2.00)", "4.50 (3.00..6.00) 3.00x !", "other had 7 errors, such as: status 502"} {
			if !strings.Contains(b.String(), want) {
				t.Errorf("no %q in\n%s", want, b.String())
			}
		}
		if strings.Contains(b.String(), "No contender had errors") {
			t.Error("the errors are denied")
		}
	}
}

// Of fewer than a thousand requests there is no p99.9.
func TestNoHighPercentileOfFew(t *testing.T) {
	for n, want := range map[int]bool{0: false, fewestFor999 - 1: false, fewestFor999: true} {
		s := new(sample)
		s.times(&outcome{latencies: make([]time.Duration, n), firsts: make([]time.Duration, n)})
		if s.P999.known() != want || s.P99.known() != (n > 0) {
			t.Errorf("of %d: p99 %v, p99.9 %v", n, s.P99, s.P999)
		}
	}
}

func TestReportSaysWhatIsMissing(t *testing.T) {
	r := report{
		contenders: []string{"caddy", "other"}, cells: []string{"c"}, rounds: 1, noClock: errors.New("no such directory"),
		samples: []*sample{{Contender: "caddy", Cell: "c"}, {Contender: "other", Cell: "c", PeakSinceStart: true}},
	}
	var b strings.Builder
	if err := r.write(&b, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NOT AVAILABLE on this system: no such directory.", "refused to reset the peak memory; it is the highest since the start of other.\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	b.Reset()
	r.noClock, r.samples = nil, r.samples[:1]
	if err := r.write(&b, false); err != nil || strings.Contains(b.String(), "NOT AVAILABLE") || strings.Contains(b.String(), "refused") || strings.Contains(b.String(), "INCOMPLETE") {
		t.Errorf("%v\n%s", err, b.String())
	}
}
