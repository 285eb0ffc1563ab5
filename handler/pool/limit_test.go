package pool

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

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
