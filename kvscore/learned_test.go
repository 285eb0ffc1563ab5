package kvscore

import (
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// recorder keeps the prompts that targets have computed.
type recorder struct {
	past  []cache.Past
	at    []Target
	ended []int // requests
}

func (j *recorder) Booked(_ time.Time, t Target, p *cache.Prompt, v *cache.View, _ bool, _ int64, _ Phase) uint64 {
	j.past = append(j.past, cache.Past{
		Root: p.Root, Blocks: slices.Clone(p.Blocks), Past: p.Past, Weight: v.NewWeight(p), Matched: v.Known.Blocks,
	})
	j.at = append(j.at, t)
	return uint64(len(j.past))
}

func (j *recorder) Answered(uint64, time.Time, Sign, int64) {}

func (j *recorder) Ended(request uint64, computed bool, _ int64, _ Counts, _ []uint64) {
	if computed {
		j.ended = append(j.ended, int(request)-1)
	}
}

// TestRestoredSchedulerChoosesAlike restores into a new scheduler what another one has
// learned and holds. Both then foresee the same.
func TestRestoredSchedulerChoosesAlike(t *testing.T) {
	now := time.Unix(1e9, 0)
	old, journal := NewScheduler(Settings{}), new(recorder)
	old.SetJournal(journal)
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
		_, l := old.selectOf(now, request(i%40, 20+i%30), targets, i%3, &PredictedLatency{}, &sel)
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
	restored, cached := int64(0), int64(0)
	for _, i := range journal.ended {
		restored += fresh.Caches().Recall(journal.at[i], &journal.past[i])
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
		old.explainOf(now, r, targets, -1, &PredictedLatency{}, &sel)
		fresh.explainOf(now, r, targets, -1, &PredictedLatency{}, &again)
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
	past := &cache.Past{Root: 1, Blocks: []uint64{1, 2, 3}, Weight: 16000, Matched: -1}
	if s.Caches().Recall(tg, past) != 48 {
		t.Fatal("it takes nothing")
	}
	s.Clear(tg)
	past.Root = 2
	if s.Caches().Recall(tg, past) != 0 {
		t.Error("it takes a prompt after it has lost its cache")
	}
	if s.Caches().Recall(Target{Worker: 2, Rank: 0}, past) != 0 {
		t.Error("an unknown target takes a prompt")
	}
	if l, _ := s.Load(time.Now(), tg); l.CachedTokens != 0 {
		t.Errorf("%d tokens are cached", l.CachedTokens)
	}
}

func TestRestoreLearnedIgnoresNonsense(t *testing.T) {
	s := NewScheduler(Settings{})
	s.Declare(Target{Worker: 1, Rank: 0}, 1000)
	before := s.Learned(time.Now())
	bad := Learned{Samples: 9, Booked: 9, Capacity: math.Inf(1), Targets: []LearnedTarget{{Target: Target{Worker: 1, Rank: 0}, Declared: 1000, Capacity: math.NaN(), Samples: 3}}}
	bad.Latency[1], bad.Prefill = math.NaN(), -1
	s.RestoreLearned(time.Now(), &bad)
	if got := s.Learned(time.Now()); !reflect.DeepEqual(got, before) {
		t.Errorf("%+v", got)
	}
}
