package pool

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"
)

// TestAddressesOfRequestsAreBounded uses more addresses than the pool keeps apart, as from a
// placeholder that a client fills in. Some addresses are invalid.
func TestAddressesOfRequestsAreBounded(t *testing.T) {
	s := wanted(worker.Settings{Dial: "static:1"})
	s.Others = true
	p := testPool(t, s)
	for _, dial := range []string{"", "127.0.0.1:9\xff", "\xff:9", "a:1-100", "a:b", strings.Repeat("a", 600) + ":1"} {
		if w := p.Worker(dial); w != p.overflow {
			t.Errorf("%q became the worker %q", dial, w.Dial)
		}
	}
	old := time.Now().Add(-time.Minute).Unix()
	busy, drained := p.Worker("busy:1"), p.Worker("drained:1")
	lease := p.serve(busy)
	drained.AskDrain(true)
	for i := range 3 * maxOverflow {
		w := p.Worker(fmt.Sprintf("host-%d:1", i))
		if i < maxOverflow/2 {
			w.See(old)
		}
	}
	busy.See(old)
	if n := len(p.All()); n > maxOverflow+1 {
		t.Errorf("%d workers are known", n)
	}
	if w := p.Worker("one-more:1"); w != p.overflow {
		t.Errorf("with %d workers in use, there is room for %s", len(p.All()), w.Dial)
	}
	l := p.serve(p.overflow)
	l.End(true, nil)
	if n := p.cached(p.overflow); n > 0 {
		t.Errorf("what is not told apart is thought to hold %d tokens", n)
	}
	for _, w := range p.All() {
		w.See(old)
	}
	p.swept = time.Time{}
	if w := p.Worker("one-more:1"); w == p.overflow {
		t.Error("there is no room though nothing is in use")
	}
	for _, w := range []*worker.Worker{busy, drained, p.Worker("static:1")} {
		if p.Known(w.Dial) != w {
			t.Errorf("%s was forgotten", w.Dial)
		}
	}
	lease.End(true, nil)
}

// TestNothingIsKeptOfUnnamedWorkersThoughManyGo retires more targets than the
// scheduler remembers as retired.
func TestNothingIsKeptOfUnnamedWorkersThoughManyGo(t *testing.T) {
	p := testPool(t, wanted())
	for id := range uint64(3000) {
		p.Scheduler.Retire(kvscore.Target{Worker: id + 1})
	}
	p.forget(time.Now())
	p.serve(p.overflow).End(true, nil)
	if n := p.cached(p.overflow); n != -1 {
		t.Errorf("%d tokens are kept", n)
	}
}

// TestEqualModelListIsNoNews records the same list again, then one with the same models
// and other entries.
func TestEqualModelListIsNoNews(t *testing.T) {
	list := func(raw string) *worker.ModelList {
		return &worker.ModelList{Entries: []worker.ModelEntry{{ID: "x", Raw: raw}}}
	}
	p, first, other := testPool(t, wanted()), list("1"), list("2")
	w := p.Worker(one)
	for i, v := range []struct{ own, want *worker.ModelList }{{first, first}, {list("1"), first}, {other, other}, {nil, nil}, {first, first}} {
		p.LearnModels(w, v.own, zap.NewNop())
		if w.List() != v.want {
			t.Errorf("step %d: another list than wanted", i)
		}
	}
}

// TestResponsesAreBounded keeps many more responses than there is room for: the
// number stays within the bound, and one that is named again and again stays.
func TestResponsesAreBounded(t *testing.T) {
	r := responses{journal: new(journal.Journal)}
	used, unused := kvscore.Target{Worker: 1, Rank: 2}, kvscore.Target{Worker: 2}
	r.Keep("used", used, affinity.Identity{7})
	r.Keep("unused", unused, affinity.Identity{})
	for i := range 5 * maxResponses {
		r.Keep("resp_"+strconv.Itoa(i), unused, affinity.Identity{})
		if i%1000 == 0 {
			if got, _, ok := r.Find("used", true); !ok || got != used {
				t.Fatalf("after %d others: %v, %v", i, got, ok)
			}
			r.Find("unused", false)
		}
	}
	if session, ok := r.Session("used"); !ok || session != (affinity.Identity{7}) {
		t.Errorf("the session is %x, %v", session, ok)
	}
	if n := r.Count(); n < maxResponses || n > 2*maxResponses {
		t.Errorf("%d are remembered", n)
	}
	if _, _, ok := r.Find("unused", true); ok {
		t.Error("one that nobody named for long is remembered")
	}
	for i := 4 * maxResponses; i < 5*maxResponses; i++ {
		if _, _, ok := r.Find("resp_"+strconv.Itoa(i), false); !ok {
			t.Fatalf("the newest, %d, is not remembered", i)
		}
	}
	if _, _, ok := r.Find("never", true); ok {
		t.Error("one is found that never was")
	}
	var again responses
	for _, one := range r.dump() {
		again.follow(one)
	}
	for _, one := range r.dump() {
		if got := again.young[one.hash]; got != one && again.old[one.hash] != one {
			t.Fatalf("%+v is restored as %+v", one, got)
		}
	}
}

func listOf(models ...string) *worker.ModelList {
	l := new(worker.ModelList)
	for _, m := range models {
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

// TestAutoLimitIsTheEngines has an engine report a limit, change it, and become another
// engine that reports none.
func TestAutoLimitIsTheEngines(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1", MaxRunning: worker.LimitAuto}, worker.Settings{Dial: "b:1", MaxRunning: 7}, worker.Settings{Dial: "c:1"}))
	limit := func(dial string) int64 { _, n := p.Worker(dial).Running(); return n }
	for _, v := range []struct {
		info engine.Info
		want int64
	}{
		{engine.Info{}, 0},
		{engine.Info{Type: engine.SGLang, MaxRunning: 4, DPSize: 2}, 8},
		{engine.Info{Type: engine.SGLang, MaxRunning: 5, DPSize: 1}, 5},
		{engine.Info{Type: engine.Dynamo, MaxRunning: 3, DPSize: 4}, 12}, // its ranks are no targets
		{engine.Info{Type: engine.LlamaCpp, MaxRunning: 3}, 3},
		{engine.Info{Type: engine.VLLM}, 0},
	} {
		for _, dial := range []string{"a:1", "b:1", "c:1"} {
			p.tell(dial, v.info)
		}
		if got := limit("a:1"); got != v.want {
			t.Errorf("the engine reports %+v: limit %d, want %d", v.info, got, v.want)
		}
		if b, c := limit("b:1"), limit("c:1"); b != 7 || c != 0 {
			t.Errorf("limits without auto are %d and %d, want 7 and 0", b, c)
		}
	}
	p.tell("b:1", engine.Info{Type: engine.SGLang, MaxRunning: 9})
	p.Apply(wanted(worker.Settings{Dial: "a:1"}, worker.Settings{Dial: "b:1", MaxRunning: worker.LimitAuto}).WithDefaults())
	if a, b := limit("a:1"), limit("b:1"); a != 0 || b != 9 {
		t.Errorf("after a reload the limits are %d and %d, want 0 and 9", a, b)
	}
}

// TestHigherAutoLimitServesTheQueue has a request wait for a worker whose engine then
// reports a higher limit.
func TestHigherAutoLimitServesTheQueue(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1", MaxRunning: worker.LimitAuto}))
	w := p.tell("a:1", engine.Info{Type: engine.SGLang, MaxRunning: 1})
	m := newWaiter(time.Now(), w)
	if !w.TakeSlot() || !p.queue.enter(m, 10) {
		t.Fatal("the request does not wait")
	}
	p.tell("a:1", engine.Info{Type: engine.SGLang, MaxRunning: 2})
	if g, ok := m.decided(); !ok || g.worker != w {
		t.Errorf("decided %v, granted %+v", ok, g)
	}
}
