package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher"
)

// crowd is clients that hold conversations of token ids with few different beginnings, so that
// their prompts branch and the engines evict.
type crowd struct {
	s    *server
	mu   sync.Mutex
	rnd  *rand.Rand
	past [][]uint32 // prompts that were sent
	next int
	fail atomic.Int64
}

// prompt returns the beginning of an earlier prompt with something new.
func (c *crowd) prompt() []uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	var p []uint32
	if n := len(c.past); n > 0 && c.rnd.IntN(5) > 0 {
		old := c.past[max(0, n-1-c.rnd.IntN(60))]
		p = append(p, old[:c.rnd.IntN(len(old)+1)]...)
	}
	c.next++
	p = append(p, idsOf(c.next, 100+c.rnd.IntN(800))...)
	if len(p) > 4000 {
		p = p[len(p)-4000:]
	}
	c.past = append(c.past, p)
	if len(c.past) > 400 {
		c.past = c.past[200:]
	}
	return p
}

// run sends requests from several clients until a number of events was published.
func (c *crowd) run(ctx context.Context, until func() bool) {
	atOnce(8, func(int) {
		for ctx.Err() == nil && !until() {
			ids, _ := json.Marshal(c.prompt())
			if a := c.s.post(ctx, "/v1/completions", []byte(`{"model":"sim-8b","max_tokens":20,"prompt":`+string(ids)+`}`)); !a.ok() {
				c.fail.Add(1)
			}
		}
	})
}

// TestIndexIsTheEnginesCaches keeps four engines of several kinds under load, with evictions,
// while their events get lost, delayed and cut off and they restart. At each quiet point, the
// router knows of each prompt what each engine holds.
func TestIndexIsTheEnginesCaches(t *testing.T) {
	blocks := uint64(40_000)
	if os.Getenv("KVROUTER_LONG") != "" {
		blocks = 1_000_000
	} else if testing.Short() {
		blocks = 10_000
	}
	engines := []*engine.Engine{
		startSimulated(t, engine.Config{Name: "e0", Blocks: 1200, Events: &engine.EventConfig{Buffer: 1_000_000}}),
		startSimulated(t, engine.Config{Name: "e1", Blocks: 800, Events: &engine.EventConfig{Form: publisher.Form{Arrays: true, Hashes: publisher.Bytes}, HashSeed: 9, Buffer: 1_000_000}}),
		startSimulated(t, engine.Config{Name: "e2", Blocks: 1000, Flavour: engine.SGLang, Events: &engine.EventConfig{HostBlocks: 500, Buffer: 1_000_000}}),
		startSimulated(t, engine.Config{Name: "e3", Blocks: 1200, BlockSize: 32, Flavour: engine.TRTLLM, Events: &engine.EventConfig{Buffer: 1_000_000}}),
	}
	s := startCaddy(t, route(engines, "policy dynamo", replayOf(engines[2]), endpointsOf(engines[3])))
	for _, e := range engines {
		s.awaitKnowledge(t, e, "live", "exact")
	}
	c := &crowd{s: s, rnd: rand.New(rand.NewPCG(1, 2))}
	of := func(change func(*publisher.Publisher)) func(*engine.Engine) error {
		return func(e *engine.Engine) error {
			change(e.Publishers()[0])
			return nil
		}
	}
	faults := []func(*engine.Engine) error{
		func(*engine.Engine) error { return nil },
		of(func(p *publisher.Publisher) { p.Drop(5) }),
		of((*publisher.Publisher).Disconnect),
		of(func(p *publisher.Publisher) { p.Delay(5 * time.Millisecond) }),
		(*engine.Engine).Restart,
	}
	const rounds = 8
	for round := range rounds {
		target := blocks * uint64(round+1) / rounds
		var enough atomic.Bool
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		go func() {
			for ctx.Err() == nil && s.applied(t) < target {
				time.Sleep(50 * time.Millisecond)
			}
			enough.Store(true)
		}()
		c.run(ctx, enough.Load)
		late := ctx.Err() != nil
		cancel()
		if late {
			t.Fatalf("round %d: only %d of %d blocks in time", round, s.applied(t), target)
		}
		for i, e := range engines {
			e.Publishers()[0].Drop(0)
			e.Publishers()[0].Delay(0)
			// Only the next batch shows that the last ones were dropped.
			ids, _ := json.Marshal(idsOf(40_000+round*len(engines)+i, 200))
			direct(e).post(t.Context(), atCompletions, []byte(`{"model":"sim-8b","max_tokens":1,"prompt":`+string(ids)+`}`))
		}
		for _, e := range engines {
			s.settle(t, e)
		}
		s.compare(t, c, engines)
		if round == rounds-1 {
			break
		}
		// Not before: an engine's last batch comes after its answers, and nothing shows that it was dropped.
		for i, e := range engines {
			noError(t, faults[(round+i)%len(faults)](e))
		}
	}
	t.Logf("events stored or removed %d blocks; %d requests failed", s.applied(t), c.fail.Load())
}

// applied returns how many blocks the events stored or removed, as the router counts them.
func (s *server) applied(t testing.TB) (n uint64) {
	t.Helper()
	var list []followed
	s.api(t, "GET", defaultPool+"/workers", nil, &list)
	for _, w := range list {
		for _, f := range w.Events {
			n += f.Stored + f.Removed
		}
	}
	return n
}

// settle waits until the router has all events of an engine.
func (s *server) settle(t testing.TB, e *engine.Engine) {
	t.Helper()
	eventually(t, "the events of engine "+e.Name(), func() bool {
		streams := s.followed(t, e).Events
		for rank, p := range e.Publishers() {
			if n := p.Published(); n > 0 && (len(streams) <= rank || streams[rank].Sequence != n-1) {
				return false
			}
		}
		return e.Quiet()
	})
}

// compare has the router and the engines say how much of earlier prompts they hold.
func (s *server) compare(t testing.TB, c *crowd, engines []*engine.Engine) {
	t.Helper()
	right(t, func() (wrong string) {
		for i := 0; i < 100 && wrong == ""; i++ {
			wrong = s.differs(t, c.past[c.rnd.IntN(len(c.past))], engines)
		}
		return wrong
	})
}

// differs returns where the router and an engine differ about a prompt; empty if nowhere.
func (s *server) differs(t testing.TB, p []uint32, engines []*engine.Engine) string {
	t.Helper()
	ids, _ := json.Marshal(p)
	x := s.explainAt(t, "/v1/completions", `{"model":"sim-8b","prompt":`+string(ids)+`}`)
	var wrong []string
	if len(x.Candidates) != len(engines) {
		return fmt.Sprintf("%d candidates for %d engines", len(x.Candidates), len(engines))
	}
	for _, e := range engines {
		held := int64(e.Cached(p))
		for _, cand := range x.Candidates {
			if cand.Dial == e.Addr() && (cand.Tokens != held || cand.Source != "exact") {
				wrong = append(wrong, fmt.Sprintf("%s holds %d tokens of %d, and the router knows %d (%s)", e.Name(), held, len(p), cand.Tokens, cand.Source))
			}
		}
	}
	return strings.Join(wrong, "; ")
}
