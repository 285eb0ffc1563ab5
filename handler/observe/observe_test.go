package observe

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
	zapobserver "go.uber.org/zap/zaptest/observer"
)

func candidatesOf(costs ...float64) (list []kvscore.Candidate) {
	for _, cost := range costs {
		list = append(list, kvscore.Candidate{Cost: cost})
	}
	return list
}

// TestBestCandidatesAreKept keeps the chosen candidate and the cheapest others.
func TestBestCandidatesAreKept(t *testing.T) {
	for _, c := range []struct {
		costs  []float64
		chosen int
		want   string
	}{
		{[]float64{3}, 0, "0"},
		{[]float64{3, 1, 2}, 2, "210"},
		{[]float64{9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, 0, "09876543"},
		{[]float64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 9, "90123456"},
	} {
		past := PastChoice{Unit: "ms"}
		past.Note(candidatesOf(c.costs...), func(i int) string { return fmt.Sprint(i) }, c.chosen)
		got := ""
		for _, c := range past.Candidates {
			got += c.Dial
		}
		if got != c.want || past.CandidateCount != len(c.costs) {
			t.Errorf("%v, %d chosen: kept %s of %d, want %s", c.costs, c.chosen, got, past.CandidateCount, c.want)
		}
	}
}

// TestLastChoicesAreRemembered makes more choices than the pool remembers.
func TestLastChoicesAreRemembered(t *testing.T) {
	p := new(Choices)
	for i := range keptChoices + 10 {
		p.Remember(&PastChoice{Request: fmt.Sprint(i)})
	}
	if got := p.Past(keptChoices*2, "", 0); len(got) != keptChoices || got[0].Request != fmt.Sprint(keptChoices+9) {
		t.Errorf("%d choices", len(got))
	}
	if got := p.Past(9, "9", 0); len(got) != 0 {
		t.Errorf("a choice is remembered for too long: %v", got[0].N)
	}
	if got := p.Past(9, "10", 11); len(got) != 1 || got[0].N != 11 {
		t.Errorf("the oldest choice: %d found", len(got))
	}
}

func TestLabelsHaveABound(t *testing.T) {
	var l Labels
	for i := range maxLabels - 1 {
		l.Label(fmt.Sprint(i))
	}
	for _, c := range [][2]string{{"0", "0"}, {"0\xff", "0�"}, {"one too many", "other"}, {"0\xff", "0�"}} {
		if got := l.Label(c[0]); got != c[1] {
			t.Errorf("%q has the label %q, want %q", c[0], got, c[1])
		}
	}
}

func TestIncidentIsLoggedOnceAtEachEnd(t *testing.T) {
	core, logs := zapobserver.New(zap.InfoLevel)
	logger := zap.New(core)
	var in Incidents
	start := time.Unix(1000, 0)
	for i := range 100 {
		in.Raise(start.Add(time.Duration(i)*time.Second), "fallback oversized", fmt.Errorf("%d", i), func() *zap.Logger { return logger })
		in.End(start.Add(time.Duration(i)*time.Second), logger)
	}
	if open := in.Open(start.Add(time.Minute)); len(open) != 1 || open[0].Error != "99" {
		t.Errorf("%+v, want the last error", open)
	}
	in.End(start.Add(99*time.Second+incidentEnd), logger)
	in.End(start.Add(time.Hour), logger)
	in.Raise(start.Add(time.Hour), "fallback oversized", nil, func() *zap.Logger { return logger })
	var got []string
	for _, e := range logs.All() {
		got = append(got, e.Message+": "+e.ContextMap()["condition"].(string))
	}
	want := []string{
		"condition begins: fallback oversized",
		"condition is over: fallback oversized",
		"condition begins: fallback oversized",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("logged %q, want %q", got, want)
	}
	if n := logs.All()[1].ContextMap()["times"]; n != int64(100) {
		t.Errorf("the incident was met %v times, want 100", n)
	}
}

func TestConditionsThatNoLongerHoldAreOverAtOnce(t *testing.T) {
	core, logs := zapobserver.New(zap.InfoLevel)
	var in Incidents
	for _, holds := range [][]Warning{{{What: "a"}}, {{What: "a"}, {What: "b"}}, {{What: "b"}}, nil, nil} {
		in.Replace(time.Unix(1000, 0), holds, zap.New(core))
	}
	var got []string
	for _, e := range logs.All() {
		got = append(got, e.Message+": "+e.ContextMap()["condition"].(string))
	}
	if want := []string{"condition begins: a", "condition begins: b", "condition is over: a", "condition is over: b"}; !reflect.DeepEqual(got, want) {
		t.Errorf("logged %q, want %q", got, want)
	}
}

// TestRecentEnds checks quantiles, and that old slots do not count.
func TestRecentEnds(t *testing.T) {
	var r Recent
	now := time.Unix(1_700_000_005, 0)
	for i := range 100 {
		r.note(now, func(s *Sums) { s.FirstTokens.note(time.Duration(i+1) * 10 * time.Millisecond) })
	}
	r.note(now.Add(SlotTime), func(s *Sums) { s.Failed = 2 })
	var sum Sums
	line := []Sums{{Slot: SlotOf(now)}, {Slot: SlotOf(now) + 1}}
	r.Add(now.Add(SlotTime), &sum, line)
	for q, want := range map[float64]time.Duration{0.5: 500 * time.Millisecond, 0.99: 990 * time.Millisecond} {
		if got := sum.FirstTokens.Quantile(q); got < want*80/100 || got > want*120/100 {
			t.Errorf("quantile %v is %v, want about %v", q, got, want)
		}
	}
	if sum.Failed != 2 || line[0].FirstTokens.N != 100 || line[1].Failed != 2 || line[1].FirstTokens.N != 0 {
		t.Errorf("sums %d, line %d %d", sum.Failed, line[0].FirstTokens, line[1].Failed)
	}
	sum = Sums{}
	r.Add(now.Add(RecentSlots*SlotTime), &sum, nil)
	if sum.FirstTokens.N != 0 || sum.Failed != 2 {
		t.Errorf("after five minutes, %d and %d are left", sum.FirstTokens.N, sum.Failed)
	}
}
