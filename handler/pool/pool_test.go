package pool

import (
	"context"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/prometheus/client_golang/prometheus"
)

// sessionsStay is the closer of a pool whose engines keep no sessions.
type sessionsStay struct{ Closer }

func (sessionsStay) Ended(affinity.Key, *affinity.Want, affinity.Reason) {}
func (sessionsStay) CloseAll()                                           {}

func noCloser(*Pool) Closer { return sessionsStay{} }

// testPool opens a pool of its own.
func testPool(t testing.TB, s *Settings) *Pool {
	t.Helper()
	p, err := New("test", s.WithDefaults(), noCloser)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Destruct(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// serve lets a worker compute a prompt of 100 blocks, up to its first token.
func (p *Pool) serve(w *worker.Worker) *kvscore.Lease {
	blocks := make([]uint64, 100)
	for i := range blocks {
		blocks[i] = uint64(i+1) * 77
	}
	var sel kvscore.Selection
	sel.Rand = newRandom()
	r := &kvscore.Request{Prompt: cache.Prompt{Root: 1, Blocks: blocks, BlockTokens: 16, Tokens: 1600}, Streamed: true}
	_, l := p.Scheduler.Select(time.Now(), r, p.Scheduler.Refs(w.Target(0)), -1, &kvscore.LeastLoad{}, &sel)
	l.FirstToken(time.Now())
	return l
}

// cached returns the tokens that a worker is thought to hold, -1 if it is not
// known.
func (p *Pool) cached(w *worker.Worker) int64 {
	load, ok := p.Scheduler.Load(time.Now(), w.Target(0))
	if !ok {
		return -1
	}
	return load.CachedTokens
}

// TestWorkersAreForgotten has the pool look for workers to forget. Static ones stay. Those of dynamic sources go if
// requests came for long without them, and those that a configuration has removed with time, also without requests.
func TestWorkersAreForgotten(t *testing.T) {
	const grace = int64(WorkerGrace / time.Second)
	for name, v := range map[string]struct {
		removed bool  // by a configuration without dynamic sources
		last    int64 // request, in seconds after the worker was last seen
		after   int64 // seconds
		lease   bool  // of a request that goes on
		gone    bool
	}{
		"an idle pool":             {false, 0, 10 * grace, false, false},
		"before its time":          {false, grace, 10 * grace, false, false},
		"requests without it":      {false, grace + 1, 10 * grace, false, true},
		"its request goes on":      {false, grace + 1, 10 * grace, true, false},
		"removed, before its time": {true, 0, grace - 60, false, false},
		"removed":                  {true, 0, grace + 60, false, true},
	} {
		s := wanted(worker.Settings{Dial: "static:1"})
		s.Others = true
		p := testPool(t, s)
		static, other := p.Worker("static:1"), p.Worker("other:1")
		p.serve(static).End(true, nil)
		lease := p.serve(other)
		if !v.lease {
			lease.End(true, nil)
		}
		if v.removed {
			with := wanted(worker.Settings{Dial: "static:1"}, worker.Settings{Dial: "other:1"})
			p.Apply(with.WithDefaults())
			other.See(1) // long ago, as an upstream
			p.Apply(wanted(worker.Settings{Dial: "static:1"}).WithDefaults())
		}
		seen := time.Now().Unix()
		if !v.removed {
			static.See(seen)
			other.See(seen)
		}
		p.lastRequest.Store(seen + v.last)
		p.forget(time.Unix(seen+v.after, 0))
		if gone := p.Known("other:1") == nil; gone != v.gone {
			t.Errorf("%s: forgotten %v, want %v", name, gone, v.gone)
		}
		if n := p.cached(other); (n > 0) == v.gone || p.Known("static:1") != static || p.cached(static) != 1600 {
			t.Errorf("%s: %d tokens of it are known, and %d of the static one", name, n, p.cached(static))
		}
		lease.End(true, nil)
	}
}

// TestNewIDLeavesNothingBehind gives one worker one id after the other, each
// with a request under way at the change.
func TestNewIDLeavesNothingBehind(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1", ID: 10}))
	var olds []kvscore.Target
	var leases []*kvscore.Lease
	for id := uint64(11); id < 15; id++ {
		w := p.Worker("a:1")
		p.serve(w).End(true, nil)
		leases, olds = append(leases, p.serve(w)), append(olds, w.Target(0))
		p.Apply(wanted(worker.Settings{Dial: "a:1", ID: id}).WithDefaults())
		if w := p.Worker("a:1"); w.ID != id || w.Target(0).Worker != id || p.cached(w) > 0 {
			t.Errorf("worker %d with target %v holds %d tokens, want a new one with id %d", w.ID, w.Target(0), p.cached(w), id)
		}
	}
	for _, l := range leases {
		if !l.End(true, nil) {
			t.Error("the lease of a request under way had been ended")
		}
	}
	for _, target := range olds {
		if _, known := p.Scheduler.Load(time.Now(), target); known {
			t.Errorf("target %v is still known", target)
		}
	}
	if s := p.Scheduler.Stats(); s.IndexBlocks != 0 || s.Leases != 0 {
		t.Errorf("%d blocks and %d leases are left", s.IndexBlocks, s.Leases)
	}
}

// TestIDsMoveAmongWorkers loads configurations that give an id of one address to another.
// No worker gets the cache model of another engine, and the scheduler knows all of them.
func TestIDsMoveAmongWorkers(t *testing.T) {
	dials := []string{"a:1", "b:1", "c:1"}
	for name, ids := range map[string][]uint64{"shifted up": {2, 3, 4}, "shifted down": {0, 1, 2}, "swapped": {2, 1, 3}, "rotated": {2, 3, 1}} {
		t.Run(name, func(t *testing.T) {
			set := func(ids []uint64) *Settings {
				var list []worker.Settings
				for i, dial := range dials {
					list = append(list, worker.Settings{Dial: dial, ID: ids[i]})
				}
				return wanted(list...).WithDefaults()
			}
			for range 8 { // the order of a map is random
				p := testPool(t, set([]uint64{1, 2, 3}))
				busy := p.Worker("b:1")
				for _, dial := range dials {
					p.serve(p.Worker(dial)).End(true, nil)
				}
				lease := p.serve(busy) // is under way at the change
				p.Apply(set(ids))
				for _, dial := range dials {
					want := int64(0)
					if w := p.Worker(dial); w == busy || dial == "c:1" && w.ID == 3 {
						want = 1600
					}
					if n := p.cached(p.Worker(dial)); n != want {
						t.Errorf("%s holds %d tokens, want %d", dial, n, want)
					}
				}
				if !lease.End(true, nil) {
					t.Error("the lease of a request under way had been ended")
				}
				for _, dial := range dials {
					w := p.Worker(dial)
					p.serve(w).End(true, nil)
					if n := p.cached(w); n != 1600 {
						t.Errorf("%s holds %d tokens after a request, want 1600", dial, n)
					}
				}
			}
		})
	}
}

// TestHandlersOfOneConfigurationAgree has two configurations: what those of the
// first want does not bind the second, and stays what they have.
func TestHandlersOfOneConfigurationAgree(t *testing.T) {
	p := testPool(t, wanted())
	one, two := prometheus.NewRegistry(), prometheus.NewRegistry()
	with := func(textBlock int, dial string) *Settings {
		s := wanted(worker.Settings{Dial: dial})
		s.TextBlock = textBlock
		return s
	}
	a, err := p.Agree(one, with(32, "a:1"))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := p.Agree(one, with(0, "b:1")); err != nil || b != a {
		t.Errorf("the second handler does not share the first one's settings, error %v", err)
	}
	if _, err := p.Agree(one, with(64, "c:1")); err == nil {
		t.Error("a contradiction within one configuration is no error")
	}
	c, err := p.Agree(two, with(128, "a:1"))
	if err != nil || c == a {
		t.Errorf("another configuration shares the settings, error %v", err)
	}
	if got := a.Get(); got.TextBlock != 32 || len(got.Upstreams) != 2 {
		t.Errorf("the first configuration has %+v", got)
	}
	if got := c.Get(); got.TextBlock != 128 || len(got.Upstreams) != 1 {
		t.Errorf("the second configuration has %+v", got)
	}
}

// TestRemovedWorkerKeepsItsLimit has a worker leave the configuration while
// requests may still wait for it, and come back under another id.
func TestRemovedWorkerKeepsItsLimit(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1", ID: 1, MaxRunning: 3}))
	w := p.Worker("a:1")
	w.TakeSlot()
	for _, v := range []struct {
		settings *Settings
		limit    int64
	}{
		{wanted(worker.Settings{Dial: "b:1"}), 3},
		{wanted(worker.Settings{Dial: "b:1"}), 3},
		{wanted(worker.Settings{Dial: "a:1", ID: 2, MaxRunning: 5}), 5},
		{wanted(worker.Settings{Dial: "a:1", ID: 2}), 0},
		{wanted(worker.Settings{Dial: "a:1", MaxRunning: 1}), 1},
		{&Settings{Others: true}, 0},
	} {
		p.Apply(v.settings.WithDefaults())
		if running, limit := p.Worker("a:1").Running(); limit != v.limit || running != 1 {
			t.Errorf("with %v: limit %d, want %d; %d running, want 1", v.settings.Workers, limit, v.limit, running)
		}
	}
	p.queue.free(w)
	if n := running(p.Worker("a:1")); n != 0 {
		t.Errorf("%d running at the end", n)
	}
}

// configuration has one worker.
type configuration struct {
	dial string
	name int // its answers have this status
}

func (c *configuration) Reaches(w *worker.Worker) bool { return w.Dial == c.dial }

func (c *configuration) Call(context.Context, *worker.Worker, string, []byte) (int, []byte, error) {
	return c.name, nil, nil
}

// TestCallsGoByTheNewestConfiguration has configurations come and go. The last one that has a
// worker is its way until the pool forgets workers, too.
func TestCallsGoByTheNewestConfiguration(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}, worker.Settings{Dial: "b:1"}))
	want := func(what, dial string, name, kept int) {
		t.Helper()
		got, _, err := p.Members.Call(t.Context(), p.Worker(dial), "/", nil)
		if got != name || (err == nil) != (name > 0) || len(p.Members.list) != kept {
			t.Errorf("%s: %s is called by %d (%v), want %d; %d are known, want %d", what, dial, got, err, name, len(p.Members.list), kept)
		}
	}
	want("at first", "a:1", 0, 0)
	leaveFirst := p.Members.Join(&configuration{"a:1", 1})
	want("joined", "a:1", 1, 1)
	want("joined", "b:1", 0, 1)
	leaveSecond := p.Members.Join(&configuration{"a:1", 2})
	want("reloaded", "a:1", 2, 2)
	leaveFirst()
	want("the old one has left", "a:1", 2, 1)
	leaveThird := p.Members.Join(&configuration{"b:1", 3})
	leaveSecond()
	want("only the ended one had it", "a:1", 2, 2)
	leaveThird()
	p.Members.Join(&configuration{"a:1", 4})
	want("it is back", "a:1", 4, 2)
	want("another is gone", "b:1", 3, 2)
	p.Members.prune(time.Now().Add(2 * WorkerGrace))
	want("for long", "b:1", 0, 1)
}
