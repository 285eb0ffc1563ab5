package pool

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"
)

func listOf(models ...string) *ModelList {
	l := &ModelList{IDs: make(map[string]bool)}
	for _, m := range models {
		l.IDs[m] = true
		l.Entries = append(l.Entries, ModelEntry{ID: m})
	}
	return l
}

// TestFiguresAreBounded uses many names of models and many workers.
func TestFiguresAreBounded(t *testing.T) {
	p := testPool(t, &Settings{Others: true})
	series := func() int {
		n := 0
		for _, c := range []prometheus.Collector{workerOutcomes, workerTokens, workerTTFT, workerITL} {
			n += testutil.CollectAndCount(c)
		}
		return n
	}
	before := series()
	w := p.Worker("10.0.0.1:8000")
	p.LearnModels(w, listOf("m"), zap.NewNop())
	for i := range 100_000 {
		if got := p.Figures(w, fmt.Sprint("client", i)).Model; got != modelOther {
			t.Fatalf("a model that no engine lists is the label %q", got)
		}
	}
	if a, b := p.Figures(w, "m"), p.Figures(w, "m"); a != b || a.Model != "m" || p.Figures(w, "").Model != "" {
		t.Error("a listed model has no label of its own, or several")
	}
	const each = len(attemptOutcomes) + 4 + 2
	if got := series() - before; got != 3*each {
		t.Errorf("%d series, want %d", got, 3*each)
	}
	var adapters []string
	for i := range 40 {
		adapters = append(adapters, fmt.Sprint("lora", i))
	}
	p.LearnModels(w, listOf(adapters...), zap.NewNop())
	p.ForgetModels(w) // m
	for _, m := range adapters {
		p.Figures(w, m)
	}
	if got := len(w.figures.byModel); got != maxModelLabels {
		t.Errorf("%d models of a worker have labels, want %d", got, maxModelLabels)
	}
	for i := range 300 {
		w := p.Worker(fmt.Sprintf("10.1.%d.%d:8000", i/250, i%250))
		p.LearnModels(w, listOf("m"), zap.NewNop())
		p.Figures(w, "m").Ended("ok", false)
		if i%100 == 99 {
			p.members.mu.Lock()
			for dial, w := range p.workers {
				if strings.HasPrefix(dial, "10.1.") {
					p.drop(w)
				}
			}
			p.members.mu.Unlock()
		}
	}
	p.members.mu.Lock()
	p.drop(w)
	p.members.mu.Unlock()
	if got := series(); got != before {
		t.Errorf("%d series stay when all workers are gone", got-before)
	}
}

// TestRecentEnds checks quantiles, and that old slots do not count.
func TestRecentEnds(t *testing.T) {
	var r Recent
	now := time.Unix(1_700_000_005, 0)
	for i := range 100 {
		r.firstToken(now, time.Duration(i+1)*10*time.Millisecond)
	}
	r.attempt(now.Add(SlotTime), true)
	r.attempt(now.Add(SlotTime), true)
	var sum Sums
	line := []Sums{{Slot: SlotOf(now)}, {Slot: SlotOf(now) + 1}}
	r.Add(now.Add(SlotTime), &sum, line)
	for q, want := range map[float64]time.Duration{0.5: 500 * time.Millisecond, 0.99: 990 * time.Millisecond} {
		if got := sum.TTFT(q); got < want*80/100 || got > want*120/100 {
			t.Errorf("quantile %v is %v, want about %v", q, got, want)
		}
	}
	if sum.Failed != 2 || line[0].FirstTokens != 100 || line[1].Failed != 2 || line[1].FirstTokens != 0 {
		t.Errorf("sums %d, line %d %d", sum.Failed, line[0].FirstTokens, line[1].Failed)
	}
	sum = Sums{}
	r.Add(now.Add(RecentSlots*SlotTime), &sum, nil)
	if sum.FirstTokens != 0 || sum.Failed != 2 {
		t.Errorf("after five minutes, %d and %d are left", sum.FirstTokens, sum.Failed)
	}
}
