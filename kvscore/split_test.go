package kvscore

import (
	"math"
	"testing"
	"time"
)

// pair is a prefill and a decode target. Their scheduler has learned nothing.
type pair struct {
	*Scheduler
	prefill, decode []TargetRef
	sel             Selection
	policy          Policy
}

func newPair() *pair {
	s, ts := declared(2)
	return &pair{Scheduler: s, prefill: s.Refs(ts[:1]...), decode: s.Refs(ts[1:]...), sel: Selection{Rand: seeded(1)}, policy: NewPredictedLatency()}
}

// choose forecasts and books the decode target.
func (p *pair) choose(now time.Time, r *Request, phases SplitRule) *Lease {
	ahead := *r
	ahead.Phase = PhasePrefill
	r.Split = p.Forecast(now, &ahead, p.prefill, p.policy, phases, &p.sel)
	_, l := p.Select(now, r, p.decode, -1, p.policy, &p.sel)
	return l
}

// ahead books the prefill phase.
func (p *pair) ahead(now time.Time, r *Request) *Lease {
	phase := *r
	phase.Phase, phase.Split, phase.ExpectedTokens = PhasePrefill, Split{}, 1
	_, l := p.Select(now, &phase, p.prefill, -1, p.policy, &p.sel)
	return l
}

// TestSplitIfThatIsSooner compares the times of both ways, with priorTimes.
func TestSplitIfThatIsSooner(t *testing.T) {
	for name, c := range map[string]struct {
		held, decoding, queued int // blocks; requests at the decode target; blocks at the prefill target
		want                   bool
	}{
		"nobody decodes: the transfer is for nothing": {0, 0, 0, false},
		"others decode":                     {0, 20, 0, true},
		"others decode, prefill is far off": {0, 20, 4000, false},
		"it holds nearly all":               {490, 20, 0, false},
	} {
		for _, policy := range []Policy{NewPredictedLatency(), new(RoundRobin)} {
			p := newPair()
			p.policy = policy
			for range c.decoding {
				_, l := p.Select(epoch, prompt(9), p.decode, 0, nil, &p.sel)
				l.FirstToken(epoch)
			}
			if c.held > 0 {
				_, l := p.Select(epoch, prompt(upTo(uint64(c.held))...), p.decode, 0, nil, &p.sel)
				l.FirstToken(epoch)
				l.End(true, nil)
			}
			if c.queued > 0 {
				p.ahead(epoch, prompt(upTo(uint64(c.queued + 10000))[10000:]...))
			}
			l := p.choose(epoch, prompt(upTo(500)...), SplitAuto)
			chosen := &p.sel.Candidates[0]
			if l.IsSplit() != c.want || chosen.Split != c.want {
				t.Errorf("%s, %T: split %v; %+v", name, policy, l.IsSplit(), chosen)
			}
			if sum := chosen.Terms.sum(); chosen.Cost != 0 && math.Abs(chosen.Cost-sum) > 1e-9*sum {
				t.Errorf("%s: cost %v is not the sum of %+v", name, chosen.Cost, chosen.Terms)
			}
			if c.want && chosen.TTFT() != p.sel.Split.Time+chosen.TransferTime+chosen.WaitTime {
				t.Errorf("%s, %T: predicted %v ms of %+v", name, policy, chosen.TTFT(), chosen)
			}
		}
	}
}

// TestDynamoChoosesDecodeTargets looks at the options with which Dynamo chooses them.
func TestDynamoChoosesDecodeTargets(t *testing.T) {
	for phases, want := range map[SplitRule]float64{SplitNever: (320+160)/16 - 4 + 30 + 7, SplitAuto: 50 + 10, SplitAlways: 50 + 10} {
		s := &Selection{Findings: Findings{Tokens: 160}, BlockSize: 16, Rand: seeded(1), Split: Split{Rule: phases}, Candidates: []Candidate{
			{Overlap: Overlap{OverlapBlocks: 4, SharedBlocks: 3}, PrefillTokens: 320, PromptBlocks: 30, UnsharedBlocks: 50, RequestBlocks: 10},
		}}
		if NewDynamo().Choose(s); s.Candidates[0].Cost != want {
			t.Errorf("%v: cost %v, want %v", phases, s.Candidates[0].Cost, want)
		}
	}
}

// TestPhasesAreBooked follows both leases of a split request.
func TestPhasesAreBooked(t *testing.T) {
	p := newPair()
	r := prompt(upTo(500)...)
	decode := p.choose(epoch, r, SplitAlways)
	prefill := p.ahead(epoch, r)
	expect := func(at []TargetRef, what string, prefill int64, blocks float64, cached int64) {
		t.Helper()
		l, _ := p.Load(epoch, at[0].Target)
		p.explainOf(epoch, r, []Target{at[0].Target}, 0, p.policy, &p.sel)
		if l.PrefillTokens != prefill || l.PromptBlocks != blocks || p.sel.Candidates[0].OverlapTokens < cached {
			t.Errorf("%s: %d tokens, %v blocks, %d cached", what, l.PrefillTokens, l.PromptBlocks, p.sel.Candidates[0].OverlapTokens)
		}
	}
	expect(p.prefill, "prefill target during its phase", 8000, 500, 0)
	expect(p.decode, "decode target during the prefill phase", 0, 500, 0)

	now := epoch.Add(240 * time.Millisecond)
	prefill.FirstToken(now)
	prefill.Counted(Counts{Prompt: 8000, Cached: 0, CachedReported: true})
	prefill.End(true, nil)
	decode.PrefillAnswered(now)
	expect(p.prefill, "prefill target after its phase", 0, 0, 7984)
	decode.FirstToken(now.Add(50 * time.Millisecond))
	decode.Output(now.Add(time.Second), 40)
	decode.Counted(Counts{Prompt: 8000, Cached: 4000, CachedReported: true})
	decode.End(true, nil)
	expect(p.decode, "decode target after its phase", 0, 0, 7984)
	idle(t, p.Scheduler, targets(2), now)
	if p.latency.samples != 1 {
		t.Errorf("%d prefill times, want that of the prefill phase", p.latency.samples)
	}
	if p.traffic.answers != 1 || p.traffic.bookings != 1 {
		t.Errorf("the phases count as several requests: %+v", p.traffic)
	}

	retried := prompt(upTo(500)...)
	retried.Phase = PhaseDecode
	if _, l := p.Select(now, retried, p.decode, -1, p.policy, &p.sel); !l.IsSplit() || l.prefill != 0 {
		t.Error("a decode phase on another target is not split")
	}
}

// TestTransferTimesAreLearned transfers prompts at one speed, then at another one. The first transfer
// includes the engines' handshake.
func TestTransferTimesAreLearned(t *testing.T) {
	p := newPair()
	now, rnd := epoch, seeded(2)
	send := func(n int, factor, first float64) {
		for range n {
			blocks := make([]uint64, 50+rnd.IntN(500))
			for i := range blocks {
				blocks[i] = rnd.Uint64()
			}
			r := prompt(blocks...)
			l := p.choose(now, r, SplitAlways)
			now = now.Add(300 * time.Millisecond)
			l.PrefillAnswered(now)
			ms := first + factor*assumedTransfer(r.Tokens)
			now, first = now.Add(time.Duration(ms*float64(time.Millisecond))), 0
			l.FirstToken(now)
			l.End(true, nil)
		}
	}
	near := func(want float64) {
		t.Helper()
		if got := p.transfer.factor(now); math.Abs(got-want) > 0.1*want {
			t.Errorf("transfers take %.2f times what is assumed, want %.2f", got, want)
		}
	}
	send(1, 1, 5000)
	near(1)
	for _, factor := range []float64{2, 8, 0.3} {
		send(100, factor, 0)
		near(factor)
	}
	now = now.Add(time.Hour)
	near(1)
}
