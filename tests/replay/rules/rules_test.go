package rules

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
)

const block = 16

func fleet(n int) *View {
	v := &View{Block: block, Model: engine.Default()}
	for range n {
		v.Engines = append(v.Engines, engine.New(v.Model, engine.NewCache(1000), nil, block))
	}
	return v
}

// selection is for a prompt of 100 blocks.
func selection(candidates ...kvscore.Candidate) *kvscore.Selection {
	s := &kvscore.Selection{Tokens: 1600, RequestBlocks: 100, BlockSize: block, Rand: rand.New(rand.NewPCG(1, 1))}
	for i := range uint64(100) {
		s.Blocks = append(s.Blocks, i+1)
	}
	for i, c := range candidates {
		c.Target.Worker = uint64(i) + 1
		c.OverlapTokens = min(int64(c.OverlapBlocks)*block, 1584)
		s.Candidates = append(s.Candidates, c)
	}
	return s
}

// fill makes an engine hold so many blocks of the prompt.
func fill(v *View, i, blocks int, s *kvscore.Selection) {
	c := v.Engines[i].Cache()
	c.Reserve(s.Blocks[:blocks], blocks)
	c.Release(s.Blocks[:blocks], nil, blocks)
}

func TestChoices(t *testing.T) {
	type candidates = []kvscore.Candidate
	for name, c := range map[string]struct {
		rule  func(*View) kvscore.Policy
		given candidates
		want  int
	}{
		"lmetric, product":             {lmetric, candidates{{OverlapBlocks: 90, Requests: 4}, {OverlapBlocks: 0, Requests: 0}}, 0},
		"lmetric, requests":            {lmetric, candidates{{OverlapBlocks: 90, Requests: 12}, {OverlapBlocks: 0, Requests: 0}}, 1},
		"lmetric, booked":              {lmetric, candidates{{OverlapBlocks: 90, PrefillTokens: 2000}, {}}, 1},
		"cache_aware, match":           {aware, candidates{{OverlapBlocks: 31, Requests: 64}, {}}, 0},
		"cache_aware, best match":      {aware, candidates{{OverlapBlocks: 31}, {OverlapBlocks: 32, Requests: 9}}, 1},
		"cache_aware, imbalance":       {aware, candidates{{OverlapBlocks: 100, Requests: 65}, {}}, 1},
		"cache_aware, relative":        {aware, candidates{{OverlapBlocks: 100, Requests: 299}, {Requests: 200}}, 0},
		"min_ttft, match":              {minTTFT, candidates{{OverlapBlocks: 10}, {OverlapBlocks: 11, Requests: 9}}, 1},
		"smetric, stays":               {smetric, candidates{{OverlapBlocks: 10, Requests: 500}, {OverlapBlocks: 9}}, 0},
		"smetric, no match":            {smetric, candidates{{Requests: 1}, {}}, 1},
		"gaie, match":                  {gaie, candidates{{OverlapBlocks: 10}, {OverlapBlocks: 11, Requests: 9}}, 1},
		"least work, fewest requests":  {leastWork, candidates{{OverlapBlocks: 10, Requests: 2}, {Requests: 1}}, 1},
		"sticky, whatever the load is": {sticky, candidates{{Requests: 1000}, {Requests: 1000}}, -1},
	} {
		s := selection(c.given...)
		p := c.rule(fleet(len(c.given)))
		got := p.Choose(s)
		if c.want >= 0 && got != c.want {
			t.Errorf("%s: chose %d, want %d: %+v", name, got, c.want, s.Candidates)
		}
		if again := p.Choose(s); c.want < 0 && got != again {
			t.Errorf("%s: chose %d and then %d", name, got, again)
		}
	}
}

func lmetric(v *View) kvscore.Policy   { return &LMetric{View: v} }
func aware(v *View) kvscore.Policy     { return &CacheAware{View: v} }
func minTTFT(v *View) kvscore.Policy   { return &MinTTFT{View: v} }
func smetric(v *View) kvscore.Policy   { return &SMetric{MinTTFT{View: v}, SMetricBound} }
func gaie(v *View) kvscore.Policy      { return &GAIE{View: v} }
func leastWork(v *View) kvscore.Policy { return &LeastWork{MinTTFT{View: v}} }
func sticky(v *View) kvscore.Policy    { return &StickyHash{View: v} }

func TestExactKnowledgeIsTheEngines(t *testing.T) {
	for name, rule := range map[string]func(*View) kvscore.Policy{"lmetric": lmetric, "cache_aware": aware, "min_ttft": minTTFT, "smetric": smetric, "gaie": gaie} {
		v := fleet(2)
		s := selection(kvscore.Candidate{OverlapBlocks: 80}, kvscore.Candidate{})
		fill(v, 1, 60, s)
		if got := rule(v).Choose(s); got != 0 {
			t.Errorf("%s chose %d by the cache model, want 0", name, got)
		}
		v.Exact = true
		if got := rule(v).Choose(s); got != 1 {
			t.Errorf("%s chose %d by the engines' blocks, want 1", name, got)
		}
	}
}

func TestGAIEReadsGauges(t *testing.T) {
	v, s := fleet(2), selection(kvscore.Candidate{OverlapBlocks: 60}, kvscore.Candidate{})
	v.Engines[0].Add(&engine.Job{In: 5, Out: 1}) // 3×0.6 against 2×1
	if got := gaie(v).Choose(s); got != 1 {
		t.Errorf("chose %d, want the one without a queue", got)
	}
	// Gauges are read every 50 ms.
	old := gaie(v)
	old.Choose(s)
	v.Engines[0], v.Engines[1] = v.Engines[1], v.Engines[0]
	v.Now = 49 * time.Millisecond
	if got := old.Choose(s); got != 1 {
		t.Errorf("after 49 ms: chose %d, want the one that had no queue", got)
	}
	v.Now = 50 * time.Millisecond
	if got := old.Choose(s); got != 0 {
		t.Errorf("after 50 ms: chose %d, want the one that has no queue", got)
	}
	v = fleet(2)
	v.Engines[0].Cache().Reserve(nil, 950)
	if got := gaie(v).Choose(s); got != 1 {
		t.Errorf("chose %d, want the one with free memory", got)
	}
	// Only the first 256 blocks match.
	v = fleet(2)
	long := selection(kvscore.Candidate{OverlapBlocks: 900, Requests: 1}, kvscore.Candidate{OverlapBlocks: 256})
	long.RequestBlocks, long.Tokens = 1000, 16_000
	gaie(v).Choose(long)
	if a, b := long.Candidates[0].Cost, long.Candidates[1].Cost; a != b {
		t.Errorf("costs are %v and %v, want the same", a, b)
	}
}

func TestWaitAges(t *testing.T) {
	v := fleet(2)
	m := &MinTTFT{View: v}
	s := selection(make([]kvscore.Candidate, 2)...)
	long := v.Model.PrefillMS(0, 1600)
	at := m.Choose(s)
	m.Placed(s, 1, at)
	m.Placed(s, 2, at)
	wait := func() float64 { return m.waits[at].left(v.Now) }
	near := func(what string, want float64) {
		t.Helper()
		if got := wait(); got < want-1e-6 || got > want+1e-6 {
			t.Errorf("%s: %v ms are left, want %v", what, got, want)
		}
	}
	near("placed", 2*long)
	v.Now = 10 * time.Millisecond
	near("after 10 ms", 2*long-10)
	v.Now = time.Second
	near("overdue", long)
	m.FirstToken(1, at)
	near("the second", long)
	m.FirstToken(2, at)
	near("idle", 0)
	m.Placed(s, 3, at)
	near("placed when idle", long)
	if got := m.Choose(s); got == at {
		t.Error("chose the one that has work")
	}
}
