package discovery

import (
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// reported returns an engine's report with so many running requests, by rank.
func reported(running ...int) (list []engine.RankLoad) {
	for rank, n := range running {
		list = append(list, engine.RankLoad{Rank: rank, EngineLoad: kvscore.EngineLoad{Running: n, WaitingTokens: -1}})
	}
	return list
}

// loadPool opens a pool with a worker whose engine is asked for its load, at a time when
// requests arrive.
func loadPool(t *testing.T, info engine.Info, on bool) (*pool.Pool, *worker.Worker, time.Time) {
	t.Helper()
	p := testPool(t, wanted(worker.Settings{Dial: "a:1", EngineLoad: &on}))
	w, now := tell(p, "a:1", info), time.Now()
	p.See(pool.Offers{Table: new(pool.Table)}, now, false)
	return p, w, now
}

func TestLoadIsAskedForOnceASecond(t *testing.T) {
	p, w, now := loadPool(t, engine.Info{Type: engine.SGLang, DPSize: 1}, true)
	at := func(ms int) time.Time { return now.Add(time.Duration(ms) * time.Millisecond) }
	claim := func(ms int, want bool) {
		t.Helper()
		if ok := claimLoad(p, w, at(ms)); ok != want {
			t.Errorf("after %d ms: asked is %v, want %v", ms, ok, want)
		}
	}
	claim(0, true)
	claim(2000, false) // not two at once
	reportLoad(p, w, at(2100), reported(1))
	claim(2100, true)
	reportLoad(p, w, at(2200), nil) // the engine does not answer
	claim(2500, false)
	claim(3050, true) // timers are not exact
}

func TestLoadIsNotAskedForInVain(t *testing.T) {
	for name, v := range map[string]struct {
		info engine.Info
		on   bool
		idle bool
	}{
		"the option is off":       {engine.Info{Type: engine.VLLM}, false, false},
		"the type is unknown":     {engine.Info{}, true, false},
		"the type reports none":   {engine.Info{Type: engine.TRTLLM}, true, false},
		"the pool has no traffic": {engine.Info{Type: engine.VLLM}, true, true},
	} {
		p, w, now := loadPool(t, v.info, v.on)
		if v.idle {
			p.See(pool.Offers{Table: new(pool.Table)}, time.Unix(1, 0), false)
		}
		if claimLoad(p, w, now) {
			t.Errorf("%s, and the engine is asked", name)
		}
		warns := slices.ContainsFunc(Warnings(w, now), func(e observe.Warning) bool { return e.What == warnNoLoad })
		if want := v.info.Type == engine.TRTLLM; warns != want {
			t.Errorf("%s: warned is %v, want %v", name, warns, want)
		}
	}
	p, w, now := loadPool(t, engine.Info{Type: engine.VLLM}, true)
	p.Report(w, worker.Outcome{Kind: worker.OutcomeRefused})
	if claimLoad(p, w, now) {
		t.Error("an engine that is away is asked")
	}
}

// TestMissingRanksAreUnknown has reports of all ranks, of some, and of ranks that the engine
// chooses itself.
func TestMissingRanksAreUnknown(t *testing.T) {
	two, one := engine.Info{Type: engine.SGLang, DPSize: 2}, engine.Info{Type: engine.VLLM, Version: "0.10.0", DPSize: 2}
	for _, tc := range []struct {
		name string
		info engine.Info
		list []engine.RankLoad
		want []int // running by rank; -1 is unknown
		all  bool
	}{
		{"all ranks", two, reported(3, 4), []int{3, 4}, true},
		{"one of two", two, reported(3, 4)[1:], []int{-1, 4}, false},
		{"more than the router knows", two, reported(3, 4, 5), []int{3, 4}, true},
		{"none", two, nil, []int{-1, -1}, false},
		{"the engine chooses", one, reported(3, 4), []int{-1}, false},
		{"the engine chooses, one is missing", one, reported(3), []int{-1}, false},
		{"one of a larger set", engine.Info{Type: engine.VLLM, Version: "0.32.0"}, []engine.RankLoad{{Rank: 5, EngineLoad: kvscore.EngineLoad{Running: 2}}}, []int{2}, true},
	} {
		p, w, now := loadPool(t, tc.info, true)
		if w.Ranks() != len(tc.want) {
			t.Fatalf("%s: the worker has %d ranks", tc.name, w.Ranks())
		}
		reportLoad(p, w, now, tc.list)
		for rank, want := range tc.want {
			l, _ := p.Scheduler.Load(now, w.Target(rank))
			got := l.Engine.Running
			if l.EngineAt.IsZero() {
				got = -1
			}
			if got != want {
				t.Errorf("%s: rank %d runs %d, want %d", tc.name, rank, got, want)
			}
		}
		if got := w.LacksLoad(now.Add(time.Minute)); got != tc.all {
			t.Errorf("%s: complete is %v, want %v", tc.name, got, tc.all)
		}
	}
}

// TestLackOfLoadIsWarnedOf has an engine that reports its load, answers now and then, stops, and
// reports again.
func TestLackOfLoadIsWarnedOf(t *testing.T) {
	p, w, now := loadPool(t, engine.Info{Type: engine.VLLM}, true)
	lacks := func() bool {
		return slices.ContainsFunc(Warnings(w, now), func(e observe.Warning) bool { return e.What == warnNoLoad })
	}
	for _, phase := range []struct {
		seconds, every int // 0: no reports
		want           bool
	}{{15, 0, false}, {20, 1, false}, {40, 5, false}, {17, 0, true}, {1, 1, false}, {17, 0, true}} {
		for i := range phase.seconds {
			now = now.Add(time.Second)
			p.See(pool.Offers{Table: new(pool.Table)}, now, false)
			claimLoad(p, w, now)
			if phase.every > 0 && i%phase.every == 0 {
				reportLoad(p, w, now, reported(0))
			} else {
				reportLoad(p, w, now, nil)
			}
		}
		if got := lacks(); got != phase.want {
			t.Errorf("after %d s with reports every %d s: warned is %v, want %v", phase.seconds, phase.every, got, phase.want)
		}
	}
	off := false
	Apply(p, wanted(worker.Settings{Dial: "a:1", EngineLoad: &off}).WithDefaults())
	if lacks() {
		t.Error("the option is off, and there is a warning")
	}
}
