package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// synthetic makes a trace of conversations with one of a few system prompts each.
func synthetic(tb testing.TB, requests int, closed bool) *trace.Trace {
	tb.Helper()
	const block, system, more, sessions = 64, 30, 8, 40
	r := rand.New(rand.NewPCG(1, 2))
	chains, next, turns := make([][]string, sessions), 1000, make([]int, sessions)
	for i := range chains {
		for k := range system {
			chains[i] = append(chains[i], fmt.Sprint(i%4*system+k))
		}
	}
	var text strings.Builder
	fmt.Fprintf(&text, `{"name":"synthetic","block":%d,"closed":%v}`+"\n", block, closed)
	for i := range requests {
		s := r.IntN(sessions)
		if turns[s]%12 == 0 { // a new conversation
			chains[s] = chains[s][:system:system]
		}
		for range more {
			chains[s] = append(chains[s], fmt.Sprint(next))
			next++
		}
		think := -1.0
		if closed {
			think = r.Float64() * 20
		}
		fmt.Fprintf(&text, `{"t":%g,"in":%d,"out":%d,"think":%g,"h":[%s],"s":%d,"k":%d}`+"\n",
			float64(i)*0.05, len(chains[s])*block+r.IntN(block), 1+r.IntN(80), think, strings.Join(chains[s], ","), s, turns[s])
		turns[s]++
	}
	t, err := trace.Read(strings.NewReader(text.String()))
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

func cell(t *trace.Trace, policy string) Config {
	return Config{Trace: t, Policy: policy, Cluster: Cluster{Engine: engine.Default(), Workers: 3, KVTokens: 60_000, ToldTimes: 1}, Speed: 1, Seed: 1}
}

func mustRun(tb testing.TB, c Config) *Result {
	tb.Helper()
	res, err := Run(c)
	if err != nil {
		tb.Fatalf("%s: %v", c.Policy, err)
	}
	return res
}

func TestEveryPolicyReplaysATrace(t *testing.T) {
	open, closed := synthetic(t, 500, false), synthetic(t, 500, true)
	for _, policy := range Policies() {
		for _, tr := range []*trace.Trace{open, closed} {
			res := mustRun(t, cell(tr, policy))
			if !(res.MeanTTFT > 8 && res.MeanTTFT <= res.P99TTFT && res.MeanTTFT < res.MeanE2E && res.HitRatio > 0.1 && res.HitRatio < 1) {
				t.Errorf("%s: %+v", policy, res)
			}
		}
	}
}

func TestASeedDecidesAll(t *testing.T) {
	tr := synthetic(t, 600, false)
	for _, policy := range Policies() {
		a, b := mustRun(t, cell(tr, policy)), mustRun(t, cell(tr, policy))
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: %+v and then %+v", policy, a, b)
		}
	}
	c := cell(tr, "random")
	a := mustRun(t, c)
	c.Seed = 2
	if b := mustRun(t, c); a.MeanTTFT == b.MeanTTFT {
		t.Error("another seed changes nothing")
	}
}

// TestOneRequest compares with what the model's formula gives.
func TestOneRequest(t *testing.T) {
	tr := &trace.Trace{BlockTokens: 16, Sessions: true, Requests: []trace.Request{{In: 5000, Out: 3, Blocks: blocks(5000 / 16)}}}
	c := cell(tr, "dynamo")
	c.Workers = 1
	for _, factor := range []float64{1, 2.5} {
		c.Slow = Slow{0, factor, 0, 1}
		res := mustRun(t, c)
		ttft := factor * engine.Default().PrefillMS(0, 5000)
		e2e := ttft + factor*(2*(8+0.04)+5e-5*(5001+5002))
		if math.Abs(res.MeanTTFT-ttft) > 1e-3 || math.Abs(res.MeanE2E-e2e) > 1e-3 {
			t.Errorf("TTFT %v ms and %v ms in all, want %v and %v", res.MeanTTFT, res.MeanE2E, ttft, e2e)
		}
	}
}

func blocks(n int) []uint64 {
	list := make([]uint64, n)
	for i := range list {
		list[i] = uint64(i) + 1
	}
	return list
}

// TestSessionsStayWhereTheyAre replays sessions bound to an engine, with a policy
// that would send each turn elsewhere, and pauses that the binding survives or not.
func TestSessionsStayWhereTheyAre(t *testing.T) {
	for think, hits := range map[time.Duration]float64{4 * time.Minute: 320.0 / 960, 6 * time.Minute: 0} {
		tr := &trace.Trace{BlockTokens: 16, Sessions: true, Closed: true, Requests: []trace.Request{
			{At: 100 * time.Second, In: 320, Out: 10, Blocks: blocks(20)},
			{Turn: 1, Think: think, In: 640, Out: 10, Blocks: blocks(40)},
		}}
		c := cell(tr, "round_robin")
		c.Sessions = true
		if res := mustRun(t, c); math.Abs(res.HitRatio-hits) > 1e-9 {
			t.Errorf("after %v: hit ratio %v, want %v", think, res.HitRatio, hits)
		}
	}
}

// TestExactKnowledgeIsTheEngines shows a policy of the router a cache model that is
// far too small, and then the engines' own blocks. Prompts are token ids, and then text.
func TestExactKnowledgeIsTheEngines(t *testing.T) {
	c := cell(synthetic(t, 1500, false), "dynamo_16")
	c.ToldTimes = 1.0 / 30
	blind := mustRun(t, c)
	c.Exact = true
	seeing := mustRun(t, c)
	if seeing.HitRatio < 1.1*blind.HitRatio {
		t.Errorf("hit ratio %v blind, %v with exact knowledge", blind.HitRatio, seeing.HitRatio)
	}
	c.Learned = true // the same of text
	if learned := mustRun(t, c); learned.HitRatio < 0.97*seeing.HitRatio {
		t.Errorf("hit ratio %v with exact knowledge of ids, %v of text", seeing.HitRatio, learned.HitRatio)
	}
	c.Number = 2 // routers that share nothing
	if two := mustRun(t, c); two.HitRatio < 0.9*seeing.HitRatio {
		t.Errorf("hit ratio %v with exact knowledge of ids, %v of text with two routers", seeing.HitRatio, two.HitRatio)
	}
}

// TestNothingIsLeft looks at engines and books when all requests are over.
func TestNothingIsLeft(t *testing.T) {
	for _, policy := range Policies() {
		for _, closed := range []bool{false, true} {
			c := cell(synthetic(t, 200, closed), policy)
			c.Sessions, c.KVTokens = closed, 25_000
			r, err := replayed(c)
			if err != nil {
				t.Fatal(err)
			}
			for i, e := range r.engines {
				if e.Waiting() != 0 || e.Cache().Usage() != 0 || r.stepping[i] {
					t.Errorf("%s: engine %d has %d jobs waiting and uses %v of its memory", policy, i, e.Waiting(), e.Cache().Usage())
				}
				load, _ := r.routers[0].scheduler.Load(r.clock(), r.targets[i])
				if load.Requests != 0 || load.PrefillTokens != 0 || load.PromptBlocks != 0 || load.OutputBlocks != 0 {
					t.Errorf("%s: booked on target %d: %+v", policy, i, load)
				}
				if load.CachedTokens > load.CapacityTokens {
					t.Errorf("%s: the cache model of target %d holds %d tokens of %d", policy, i, load.CachedTokens, load.CapacityTokens)
				}
			}
			for i := range r.requests {
				q := &r.requests[i]
				if q.Cached < 0 || q.Cached >= q.In || q.first <= q.arrived {
					t.Errorf("%s: request %d has %d of %d tokens cached and its first token %v after its arrival", policy, i, q.Cached, q.In, q.first-q.arrived)
				}
			}
		}
	}
}
