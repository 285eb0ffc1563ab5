package sim

import (
	"math"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// apart makes requests of a prompt of its own each, one every ten seconds.
func apart(n, tokens int) *trace.Trace {
	tr := &trace.Trace{BlockTokens: 16, Sessions: true}
	all := blocks(n * (tokens / 16))
	for i := range n {
		tr.Requests = append(tr.Requests, trace.Request{
			At: time.Duration(i) * 10 * time.Second, In: tokens, Out: 2, Session: i,
			Blocks: all[i*(tokens/16) : (i+1)*(tokens/16)],
		})
	}
	return tr
}

// run replays a cell and keeps it for a look at its insides.
func run(t *testing.T, c Config) *replay {
	t.Helper()
	r, err := replayed(c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestSessionsStayOnTheirRank(t *testing.T) {
	tr := synthetic(t, 400, true)
	c := cell(tr, "round_robin")
	c.Ranks, c.Sessions = 2, true
	r := run(t, c)
	at := map[int]int{}
	for i := range r.requests {
		session := tr.Requests[i].Session
		if old, ok := at[session]; ok && old != r.requests[i].at {
			t.Fatalf("session %d went to target %d and then to %d", session, old, r.requests[i].at)
		}
		at[session] = r.requests[i].at
	}
}

func TestAWorkerIsSlowForAWhile(t *testing.T) {
	c := cell(apart(300, 1600), "round_robin")
	c.Workers, c.Slow = 1, []Slow{{0, 3, 0.5, 0.75}}
	r := run(t, c)
	fast := engine.Default().PrefillMS(0, 1600)
	for i := range r.requests {
		want := fast
		if i >= 150 && i < 225 {
			want = 3 * fast
		}
		if got := milliseconds(r.requests[i].first - r.requests[i].arrived); math.Abs(got-want) > 0.01 && i != 149 && i != 224 {
			t.Errorf("request %d: TTFT %v ms, want %v", i, got, want)
		}
	}
}

func TestCapacitiesByWorker(t *testing.T) {
	c := cell(synthetic(t, 300, false), "lmetric")
	c.KVTokens, c.ToldTimes = []int64{20_000, 40_000, 60_000}, 0.5
	r := run(t, c)
	for w, want := range []int64{20_000, 40_000, 60_000} {
		load, ok := r.scheduler.Load(r.clock(), r.targets[w])
		if want = want / 64 * 64; !ok || load.ReportedTokens != want/2 || r.engines[w].Cache().Capacity() != int(want/64) {
			t.Errorf("worker %d: told %d tokens, has %d blocks of 64", w, load.ReportedTokens, r.engines[w].Cache().Capacity())
		}
	}
}
