package pool

import (
	"fmt"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"
)

func listOf(models ...string) *worker.ModelList {
	l := &worker.ModelList{IDs: make(map[string]bool)}
	for _, m := range models {
		l.IDs[m] = true
		l.Entries = append(l.Entries, worker.ModelEntry{ID: m})
	}
	return l
}

// TestFiguresAreBounded uses many names of models and many workers.
func TestFiguresAreBounded(t *testing.T) {
	p := testPool(t, &Settings{Others: true})
	series := func() int {
		n := 0
		for _, c := range observe.Collectors() {
			n += testutil.CollectAndCount(c)
		}
		return n
	}
	before := series()
	w := p.Worker("10.0.0.1:8000")
	p.LearnModels(w, listOf("m"), zap.NewNop())
	for i := range 100_000 {
		if got := w.ModelMetrics(fmt.Sprint("client", i)).Model; got != "other" {
			t.Fatalf("a model that no engine lists is the label %q", got)
		}
	}
	if a, b := w.ModelMetrics("m"), w.ModelMetrics("m"); a != b || a.Model != "m" || w.ModelMetrics("").Model != "" {
		t.Error("a listed model has no label of its own, or several")
	}
	const each, most = 11 + 4 + 2, 16 // of a model; models of a worker
	if got := series() - before; got != 3*each {
		t.Errorf("%d series, want %d", got, 3*each)
	}
	var adapters []string
	for i := range 40 {
		adapters = append(adapters, fmt.Sprint("lora", i))
	}
	p.LearnModels(w, listOf(adapters...), zap.NewNop())
	w.Past.ForgetModels(w.KnownToServe) // m
	for _, m := range adapters {
		w.ModelMetrics(m)
	}
	if got := series() - before; got != most*each {
		t.Errorf("%d series of a worker with many models, want %d", got, most*each)
	}
	for i := range 300 {
		w := p.Worker(fmt.Sprintf("10.1.%d.%d:8000", i/250, i%250))
		p.LearnModels(w, listOf("m"), zap.NewNop())
		w.ModelMetrics("m").Ended("ok", false)
		if i%100 == 99 {
			p.mu.Lock()
			for dial, w := range p.workers {
				if strings.HasPrefix(dial, "10.1.") {
					p.drop(w)
				}
			}
			p.mu.Unlock()
		}
	}
	p.mu.Lock()
	p.drop(w)
	p.mu.Unlock()
	if got := series(); got != before {
		t.Errorf("%d series stay when all workers are gone", got-before)
	}
}
