package sim

import (
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/synth"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// queued returns a cell on two engines, whose routers may hold requests.
func queued(t *trace.Trace, hold bool) Config {
	c := cell(t, "predicted_latency")
	c.Workers, c.Queue = 2, Queue{Hold: hold, Step: 4096, Depth: 1}
	return c
}

func TestNothingIsHeldWhileAnEngineHasRoom(t *testing.T) {
	tr := synth.NewTenants(2, 60).Interactive().Trace()
	if off, held := mustRun(t, queued(tr, false)), mustRun(t, queued(tr, true)); off.Figures != held.Figures {
		t.Errorf("%+v, want %+v", held.Figures, off.Figures)
	}
}

// TestOneTenantDoesNotStarveOthers has prompts of one tenant that two engines compute in 13 s.
func TestOneTenantDoesNotStarveOthers(t *testing.T) {
	tr := synth.NewTenants(5, 40).Interactive().Flood(10, 80, 8192, synth.InteractiveTenants).Trace()
	others := func(r *Result) (slowest time.Duration) {
		for i, x := range r.Outcomes {
			if tr.Requests[i].Tenant != synth.InteractiveTenants {
				slowest = max(slowest, x.First-x.Arrived)
			}
		}
		return slowest
	}
	if off := others(mustRun(t, queued(tr, false))); off < 10*time.Second {
		t.Errorf("nobody waits longer than %v without a queue", off)
	}
	for _, n := range []int{1, 2, 4} {
		c := queued(tr, true)
		c.Routers = Routers{Number: n, Share: n > 1, Late: 10 * time.Millisecond}
		if slowest := others(mustRun(t, c)); slowest > 5*time.Second {
			t.Errorf("%d routers: somebody waits %v", n, slowest)
		}
	}
}

// TestRoutersServeAllTenants has two tenants flood two routers. Each router serves both. So no request waits
// until the other tenant has nothing at its router.
func TestRoutersServeAllTenants(t *testing.T) {
	const long = 200
	tr := synth.NewTenants(1, 0).Flood(0, long, 8192, 0).Flood(0, 16*long, 1024, 1).Weights(1, 3).Trace()
	for seed := range uint64(2) {
		c := queued(tr, true)
		c.Seed, c.Workers, c.KVTokens, c.Queue.Depth = seed+1, 8, 500_000, 2
		c.Routers = Routers{Number: 2, Share: true, Late: 10 * time.Millisecond}
		var begun []time.Duration // in the order of arrival
		for i, x := range mustRun(t, c).Outcomes {
			if tr.Requests[i].Tenant == 0 {
				begun = append(begun, x.First)
			}
		}
		early := slices.Max(begun[:long/10])
		slices.Sort(begun)
		if half := begun[long/2]; early > half/2 {
			t.Errorf("one of the first %d requests begins after %v, half of all by %v", long/10, early, half)
		}
	}
}

func TestARouterRefusesWhatWouldBeLate(t *testing.T) {
	const target = 2 * time.Second
	share := func(late queue.Late) (in, refused float64) {
		tr := synth.NewTenants(60, 30).Batch().Target(target, late).Trace()
		r := mustRun(t, queued(tr, true))
		for _, x := range r.Outcomes {
			switch {
			case x.Refused:
				refused++
			case x.First-x.Arrived <= target:
				in++
			}
		}
		n := float64(len(r.Outcomes))
		if best := Oracle(r.Outcomes, target); late == queue.Serve && in/n > best {
			t.Errorf("%v in time, the oracle has %v", in/n, best)
		}
		return in / n, refused / n
	}
	serve, _ := share(queue.Serve)
	if refuse, refused := share(queue.Refuse); refuse < 2*serve || refused == 0 || refused > 0.7 {
		t.Errorf("%v in time and %v refused, %v in time if all are served", refuse, refused, serve)
	}
}

// TestOracle has one long request among short ones, which would all be late behind it.
func TestOracle(t *testing.T) {
	const s = time.Second
	all := []Outcome{{First: s, Work: 1}, {First: 4 * s, Work: 3}, {First: 5 * s, Work: 1}, {First: 6 * s, Work: 1}}
	if got := Oracle(all, 3*s); got != 0.75 {
		t.Errorf("got %v", got)
	}
}
