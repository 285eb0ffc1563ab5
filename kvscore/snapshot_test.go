package kvscore

import (
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// TestRestoredSchedulerChoosesAlike restores into a new scheduler what another one has
// learned and holds. Both then foresee the same.
func TestRestoredSchedulerChoosesAlike(t *testing.T) {
	now := time.Unix(1e9, 0)
	old := NewScheduler(Settings{})
	targets := []Target{{Worker: 1, Rank: 0}, {Worker: 2, Rank: 0}, {Worker: 3, Rank: 0}}
	for _, tg := range targets {
		old.Declare(tg, 100_000)
	}
	var sel Selection
	request := func(i, n int) *Request {
		r := &Request{Prompt: cache.Prompt{Root: 7, BlockTokens: 16, Tokens: int64(16 * n)}, Streamed: true}
		for b := range n {
			r.Blocks = append(r.Blocks, uint64(i*1000+b))
		}
		return r
	}
	for i := range 300 {
		_, l := old.Select(now, request(i%40, 20+i%30), targets, i%3, &PredictedLatency{}, &sel)
		now = now.Add(time.Duration(3+i%3) * 10 * time.Millisecond)
		l.FirstToken(now)
		l.End(true, nil)
	}
	learned := old.Learned(now)
	fresh := NewScheduler(Settings{})
	for _, tg := range targets {
		fresh.Declare(tg, 0) // the engines report it later
	}
	fresh.RestoreLearned(now, &learned)
	for _, tg := range targets {
		fresh.Declare(tg, 100_000)
	}
	var w cache.Walk
	restored, cached := int64(0), int64(0)
	for more := true; more; {
		more = old.Caches().Read(&w)
		for i := range w.Chains {
			restored += fresh.Caches().Restore(w.Targets[i], &w.Chains[i])
		}
	}
	for _, tg := range targets {
		l, _ := old.Load(now, tg)
		cached += l.CachedTokens
	}
	if restored != cached {
		t.Errorf("%d tokens are restored of %d", restored, cached)
	}
	var again Selection
	for i := range 40 {
		r := request(i, 50)
		old.Explain(now, r, targets, -1, &PredictedLatency{}, &sel)
		fresh.Explain(now, r, targets, -1, &PredictedLatency{}, &again)
		for k := range targets {
			a, b := &sel.Candidates[k], &again.Candidates[k]
			if a.HeldBlocks != b.HeldBlocks || a.OverlapTokens != b.OverlapTokens || math.Abs(a.PrefillTime-b.PrefillTime) > 0.1 || math.Abs(a.Slowness-b.Slowness) > 1e-2 {
				t.Fatalf("prompt %d: %+v, restored %+v", i, *a, *b)
			}
		}
	}
	back := fresh.Learned(now)
	for _, l := range []*Learned{&learned, &back} {
		slices.SortFunc(l.Targets, func(a, b LearnedTarget) int { return int(a.Target.Worker) - int(b.Target.Worker) })
	}
	if !reflect.DeepEqual(learned, back) {
		t.Errorf("learned %+v\nrestored %+v", learned, back)
	}
}

// TestClearedTargetTakesNoOldCache has an engine that restarts while its cache model is being
// restored.
func TestClearedTargetTakesNoOldCache(t *testing.T) {
	s := NewScheduler(Settings{})
	tg := Target{Worker: 1, Rank: 0}
	s.Declare(tg, 0)
	held := &cache.Chain{Root: 1, Blocks: []uint64{1, 2, 3}, Parts: []cache.Part{{Blocks: 3, Weight: 16000}}}
	if s.Caches().Restore(tg, held) != 48 {
		t.Fatal("it takes nothing")
	}
	s.Clear(tg)
	held.Root = 2
	if s.Caches().Restore(tg, held) != 0 {
		t.Error("it takes a chain after it has lost its cache")
	}
	if s.Caches().Restore(Target{Worker: 2, Rank: 0}, held) != 0 {
		t.Error("an unknown target takes a chain")
	}
	if l, _ := s.Load(time.Now(), tg); l.CachedTokens != 0 {
		t.Errorf("%d tokens are cached", l.CachedTokens)
	}
}

func TestRestoreLearnedIgnoresNonsense(t *testing.T) {
	s := NewScheduler(Settings{})
	s.Declare(Target{Worker: 1, Rank: 0}, 1000)
	before := s.Learned(time.Now())
	bad := Learned{Samples: 9, Requests: 9, Capacity: math.Inf(1), Targets: []LearnedTarget{{Target: Target{Worker: 1, Rank: 0}, Declared: 1000, Capacity: math.NaN(), Samples: 3}}}
	bad.Latency[1], bad.Continued = math.NaN(), -1
	s.RestoreLearned(time.Now(), &bad)
	if got := s.Learned(time.Now()); !reflect.DeepEqual(got, before) {
		t.Errorf("%+v", got)
	}
}

func TestRatiosSurvive(t *testing.T) {
	old, fresh := Ratios{Seed: 5}, Ratios{Seed: 5}
	fresh.Restore(old.Learned())
	blocks := []uint64{1, 2, 3, 33, 34}
	old.Learn("a", blocks, 0, 64, 100)
	old.Learn("b", blocks, 0, 64, 60)
	fresh.Learn("b", blocks, 0, 64, 80)
	own := fresh.Weights("b", 64)
	fresh.Restore(old.Learned())
	if got, want := fresh.Weights("a", 64), old.Weights("a", 64); *got.Kinds != *want.Kinds {
		t.Errorf("%v, restored %v", *want.Kinds, *got.Kinds)
	}
	if got := fresh.Weights("b", 64); *got.Kinds != *own.Kinds {
		t.Error("what was learned since the start is lost")
	}
	bad := ModelRatios{Name: 9}
	fresh.Restore([]ModelRatios{bad})
	if n := len(fresh.Learned()); n != 3 {
		t.Errorf("%d ratios, want 3", n)
	}
}
