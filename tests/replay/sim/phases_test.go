package sim

import (
	"math"
	"reflect"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// TestOneSplitRequest compares with what the model's formula gives: a prefill, a transfer at 20
// GB/s, and a step for each token of the answer. The first step computes the last prompt token.
func TestOneSplitRequest(t *testing.T) {
	tr := &trace.Trace{BlockTokens: 16, Requests: []trace.Request{{In: 5000, Out: 3, Blocks: blocks(5000 / 16)}}}
	c := cell(tr, "dynamo")
	c.Workers, c.Split = 2, Split{Prefill: 1, Phases: kvscore.SplitAlways, GBs: 20}
	res := mustRun(t, c)
	ttft := engine.Default().PrefillMS(0, 5000) + 2 + 5000*131072/20e6 + engine.Default().PrefillMS(4999, 1)
	gap := 8 + 0.04 + 5e-5*(5001+5002)/2
	if math.Abs(res.MeanTTFT-ttft) > 1e-3 || math.Abs(res.MeanGap-gap) > 1e-3 || res.Split != 1 {
		t.Errorf("TTFT %v ms, %v ms between tokens, want %v and %v", res.MeanTTFT, res.MeanGap, ttft, gap)
	}
}

// TestNothingIsLeftOfPhases looks at engines and books when all requests are over, with little memory.
func TestNothingIsLeftOfPhases(t *testing.T) {
	for phases := range kvscore.SplitNames {
		for _, preempt := range []bool{false, true} {
			c := cell(synthetic(t, 300, preempt), "predicted_latency")
			c.Sessions, c.KVTokens, c.Preempt = preempt, 25_000, preempt
			c.Split = Split{Prefill: 1, Phases: kvscore.SplitRule(phases), GBs: 20}
			r, err := replayed(c)
			if err != nil {
				t.Fatal(err)
			}
			for i, e := range r.engines {
				load, _ := r.routers[0].scheduler.Load(r.clock(), r.targets[i])
				if e.Waiting() != 0 || e.Cache().Usage() != 0 || load.Requests != 0 || load.PrefillTokens != 0 || load.PromptBlocks != 0 {
					t.Errorf("%v: engine %d has %d jobs waiting and uses %v of its memory; booked %+v", c.Phases, i, e.Waiting(), e.Cache().Usage(), load)
				}
			}
			if split := r.result().Split; (split > 0) != (c.Phases != kvscore.SplitNever) || (split == 1) != (c.Phases == kvscore.SplitAlways) {
				t.Errorf("%v: %v of the requests are split", c.Phases, split)
			}
			if again := mustRun(t, c); !reflect.DeepEqual(again, r.result()) {
				t.Errorf("%v: another result with the same seed", c.Phases)
			}
		}
	}
}
