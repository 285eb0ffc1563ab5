package rules

import (
	"math/rand/v2"
	"testing"

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
	s := &kvscore.Selection{Findings: kvscore.Findings{Tokens: 1600, RequestBlocks: 100}, BlockSize: block, Rand: rand.New(rand.NewPCG(1, 1))}
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

func holds(blocks float64) kvscore.Overlap { return kvscore.Overlap{OverlapBlocks: blocks} }

func TestChoices(t *testing.T) {
	type candidates = []kvscore.Candidate
	for name, c := range map[string]struct {
		rule  func(*View) kvscore.Policy
		given candidates
		want  int
	}{
		"lmetric, product":             {lmetric, candidates{{Overlap: holds(90), Requests: 4}, {Requests: 0}}, 0},
		"lmetric, requests":            {lmetric, candidates{{Overlap: holds(90), Requests: 12}, {Requests: 0}}, 1},
		"lmetric, booked":              {lmetric, candidates{{Overlap: holds(90), PrefillTokens: 2000}, {}}, 1},
		"cache_aware, match":           {aware, candidates{{Overlap: holds(31), Requests: 64}, {}}, 0},
		"cache_aware, best match":      {aware, candidates{{Overlap: holds(31)}, {Overlap: holds(32), Requests: 9}}, 1},
		"cache_aware, imbalance":       {aware, candidates{{Overlap: holds(100), Requests: 65}, {}}, 1},
		"cache_aware, relative":        {aware, candidates{{Overlap: holds(100), Requests: 299}, {Requests: 200}}, 0},
		"min_ttft, match":              {minTTFT, candidates{{Overlap: holds(10)}, {Overlap: holds(11), Requests: 9}}, 1},
		"smetric, stays":               {smetric, candidates{{Overlap: holds(10), Requests: 500}, {Overlap: holds(9)}}, 0},
		"smetric, no match":            {smetric, candidates{{Requests: 1}, {}}, 1},
		"gaie, match":                  {gaie, candidates{{Overlap: holds(10)}, {Overlap: holds(11), Requests: 9}}, 1},
		"least work, fewest requests":  {leastWork, candidates{{Overlap: holds(10), Requests: 2}, {Requests: 1}}, 1},
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
