package admin

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
)

// testPool returns a pool with n workers.
func testPool(t testing.TB, n int) *pool.Pool {
	s := &pool.Settings{Upstreams: make(map[string]bool), Workers: make(map[string]worker.Settings)}
	for i := range n {
		s.Upstreams[fmt.Sprintf("10.0.%d.%d:8000", i/256, i%256)] = true
	}
	p, err := pool.New(t.Name(), s.WithDefaults(), turn.NewCloser)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Destruct() })
	return p
}

// serve lets a worker answer requests of a model.
func serve(p *pool.Pool, w *worker.Worker, model string, n, failed int, ttft time.Duration, predicted, cached int64) {
	f := w.ModelMetrics(model)
	for i := range n {
		f.Ended("ok", i < failed)
		f.FirstToken(time.Now(), ttft)
		f.Pace(ttft / 10)
		f.Compared(1000, predicted, cached)
	}
}

// serveFor has n workers of a pool serve for a minute, each as of says.
func serveFor(p *pool.Pool, workers []*worker.Worker, of func(i int) (n, failed int, ttft time.Duration, predicted, cached int64)) {
	for range 4 {
		for i, w := range workers {
			n, failed, ttft, predicted, cached := of(i)
			serve(p, w, "", n, failed, ttft, predicted, cached)
		}
		time.Sleep(observe.SlotTime)
	}
}

// TestWorkersApartHaveAnomalies makes one of eight workers slow, one failing and one cold. Conversations
// leave the first two, and the third computes more than predicted.
func TestWorkersApartHaveAnomalies(t *testing.T) {
	synctest.Test(t, testAnomalies)
}

func testAnomalies(t *testing.T) {
	p := testPool(t, 8)
	workers := sortedWorkers(p)
	want := map[int]string{2: anomalySlow, 4: anomalyFailing, 6: anomalyCold}
	shown := func(when string, want map[int]string) {
		t.Helper()
		for i, w := range viewState(p, 0, true, time.Now()).Workers {
			if got := strings.Join(w.Anomalies, " "); got != want[i] || len(w.Look) != len(w.Anomalies) {
				t.Errorf("%s, worker %d: anomalies %q, want %q: %v", when, i, got, want[i], w.Look)
			}
		}
	}
	serve(p, workers[6], "", 100, 0, time.Second, 800, 0)
	shown("after a moment", nil)
	time.Sleep(observe.RecentSlots * observe.SlotTime)
	serveFor(p, workers, func(i int) (n, failed int, ttft time.Duration, predicted, cached int64) {
		n, failed, ttft, predicted, cached = 20, 1, 100*time.Millisecond, 800, 800
		switch want[i] {
		case anomalySlow:
			ttft, predicted, cached = 3*ttft, 300, 300
		case anomalyFailing:
			failed, predicted, cached = 4, 300, 300
		case anomalyCold:
			ttft, cached = 3*ttft, 100
		default:
			if i == 7 { // its prompts have little in common
				predicted, cached = 100, 100
			}
		}
		return n, failed, ttft, predicted, cached
	})
	shown("after a minute", want)
	time.Sleep(observe.RecentSlots*observe.SlotTime - time.Minute)
	shown("while it is true", want)
	time.Sleep(time.Minute)
	shown("when it is over", nil)

	serveFor(p, workers, func(int) (n, failed int, ttft time.Duration, predicted, cached int64) {
		return 20, 10, 100 * time.Millisecond, 800, 800
	})
	shown("while all fail alike", nil)
	if s := viewState(p, 0, true, time.Now()); !s.Recent.fails() {
		t.Errorf("half of the attempts fail, and the pool is well: %+v", s.Recent)
	}
	if got := viewState(testPool(t, 1), 0, true, time.Now()).Workers[0].Anomalies; len(got) > 0 {
		t.Errorf("a worker without requests has anomalies: %v", got)
	}
	alone := []workerView{{Models: modelsView{Listed: []string{"big"}}, slowness: 3}, {Models: modelsView{Listed: []string{"small"}}, slowness: 1}}
	for i := range alone {
		alone[i].State = stateOK
	}
	if findAnomalies(alone, make([]observe.Sums, 2)); len(alone[0].Anomalies) > 0 {
		t.Errorf("a worker without peers has anomalies: %v", alone[0].Anomalies)
	}
}

// TestHistoryGoesOn asks for a history in two parts.
func TestHistoryGoesOn(t *testing.T) {
	p := testPool(t, 1)
	now := time.Now()
	first := viewState(p, 0, true, now)
	if len(first.History) != observe.RecentSlots-1 || first.Until != observe.SlotOf(now)*slotSeconds {
		t.Errorf("%d slots to %d", len(first.History), first.Until)
	}
	for slots, want := range []int{0, 1, 2} {
		got := viewState(p, first.Until, true, now.Add(time.Duration(slots)*observe.SlotTime))
		if len(got.History) != want || got.History == nil || len(got.Workers[0].History) != want {
			t.Errorf("%d slots later: %d new ones, %d of the worker", slots, len(got.History), len(got.Workers[0].History))
		}
	}
}

func TestSentences(t *testing.T) {
	at := func(dial string, cost float64, held int64) *candidateView {
		return &candidateView{Dial: dial, Candidate: &kvscore.Candidate{Cost: cost, Overlap: kvscore.Overlap{OverlapTokens: held}}}
	}
	for _, c := range []struct {
		reason, unit string
		tokens       int64
		chosen, next *candidateView
		want         string
	}{
		{"pin", "", 9, at("a", 0, 0), nil, "The request names it."},
		{"load", "ms", 0, at("a", 5, 0), nil, "The prompt is unknown. It is the only candidate."},
		{"session", "", 90, at("a", 0, 80), at("b", 0, 0), "The session is bound to it. It has 80 of 90 prompt tokens cached."},
		{"overlap", "ms", 90, at("a", 5.25, 80), at("b", 12.6, 0), "It has 80 of 90 prompt tokens cached. Cost 5.2 ms; next: b, 13 ms."},
		{"load", "blocks", 90, at("a", 3, 0), at("b", 2, 0), "It has nothing cached of 90 prompt tokens. Cost 3.0 blocks, not the lowest (b, 2.0 blocks): a draw decided."},
	} {
		if got := sentence(c.reason, c.unit, c.tokens, c.chosen, c.next); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}

// TestInvalidLabelCostsOnlyItsFigure collects a figure whose label is no UTF-8.
func TestInvalidLabelCostsOnlyItsFigure(t *testing.T) {
	to := sink{make(chan prometheus.Metric, 2), []string{"pool"}}
	to.gauge(descAvailable, 1, "127.0.0.1:9\xff")
	to.gauge(descAvailable, 1, "127.0.0.1:9")
	if n := len(to.ch); n != 1 {
		t.Errorf("%d figures", n)
	}
}

// TestStatusTellsNamesApart cuts long names to the width of a terminal, and cuts none without one.
func TestStatusTellsNamesApart(t *testing.T) {
	list := []workerView{
		{Dial: "vllm-0.vllm.models.svc.cluster.local:8000", State: stateOK, Role: engine.RoleBoth, Models: modelsView{Listed: []string{"Qwen/Qwen3-Coder-480B-A35B-Instruct"}}},
		{Dial: "vllm-1.vllm.models.svc.cluster.local:8000", State: stateOK, Role: engine.RoleBoth, Models: modelsView{Listed: []string{"Qwen/Qwen3-235B-A22B-Instruct"}}},
	}
	for width, want := range map[int][]string{
		80:  {"vllm-0.v", "vllm-1.v", "Qwen3-Coder", "Qwen3-235B"},
		999: {list[0].Dial + " ", list[1].Dial + " ", list[0].Models.Listed[0] + " "},
	} {
		var b strings.Builder
		writeWorkers(&b, list, width)
		for _, text := range want {
			if !strings.Contains(b.String(), text) {
				t.Errorf("%d columns: no %q in\n%s", width, text, b.String())
			}
		}
		for line := range strings.Lines(b.String()) {
			if n := len([]rune(line)); n > width {
				t.Errorf("%d columns, want at most %d: %s", n, width, line)
			}
		}
		if strings.Contains(b.String(), "TTFT") {
			t.Errorf("a column without figures is shown:\n%s", b.String())
		}
	}
}
