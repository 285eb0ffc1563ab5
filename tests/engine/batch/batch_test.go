package batch

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
)

func tokens(start uint32, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = start + uint32(i)
	}
	return out
}

func newBatcher(t testing.TB, budget, running, blocks, size int) (*Batcher, *cache.Cache) {
	t.Helper()
	c := cache.New(blocks, size, nil)
	b, err := New(Config{TokenBudget: budget, MaxRunning: running, Step: DefaultStepModel}, c)
	if err != nil {
		t.Fatal(err)
	}
	return b, c
}

func request(id uint64, prompt []uint32, answer, size int) *Request {
	return &Request{ID: id, Prompt: cache.NewPrompt(cache.Root{}, prompt, size), Answer: tokens(1<<20, answer)}
}

func submit(t testing.TB, b *Batcher, r *Request) {
	t.Helper()
	if err := b.Submit(r); err != nil {
		t.Fatal(err)
	}
}

// drain steps until nothing is left, and returns all events.
func drain(b *Batcher, now time.Duration) []Event {
	var all []Event
	for {
		all = append(all, slices.Clone(b.Step(now))...)
		d := b.NextStepDuration()
		if d == 0 {
			return all
		}
		now += d
	}
}

// admitted returns the cached tokens of each request, and firstToken when it had
// its first one.
func admitted(events []Event) map[uint64]int {
	out := map[uint64]int{}
	for _, e := range events {
		if e.Kind == Admitted {
			out[e.Request.ID] = e.Cached
		}
	}
	return out
}

func firstToken(events []Event) map[uint64]time.Duration {
	out := map[uint64]time.Duration{}
	for _, e := range events {
		if e.Kind == Token && e.Index == 0 {
			out[e.Request.ID] = e.At
		}
	}
	return out
}

func ms(x float64) time.Duration { return time.Duration(x * float64(time.Millisecond)) }

// TestStepTime has one request alone: a prefill in two chunks, then decodes.
func TestStepTime(t *testing.T) {
	b, _ := newBatcher(t, 4096, 8, 1000, 16)
	submit(t, b, request(1, tokens(1, 5000), 3, 16))
	var got []time.Duration
	for {
		b.Step(0)
		d := b.NextStepDuration()
		if d == 0 {
			break
		}
		got = append(got, d)
	}
	want := []time.Duration{
		ms(8 + 0.04*4096 + 1.5e-6*4096*2048),
		ms(8 + 0.04*904 + 1.5e-6*904*(4096+452)),
		ms(8 + 0.04 + 5e-5*5000),
		ms(8 + 0.04 + 5e-5*5001),
	}
	if len(got) != len(want) {
		t.Fatalf("%d steps, want %d", len(got), len(want))
	}
	for i := range want {
		if (got[i] - want[i]).Abs() > time.Microsecond {
			t.Errorf("step %d took %v, want %v", i, got[i], want[i])
		}
	}
}

// TestInFlightIsHittable is what a real vLLM showed. Two requests share 4000
// tokens with one whose prefill has begun. They report all of them cached, and
// get their first tokens with it, not before it.
func TestInFlightIsHittable(t *testing.T) {
	b, _ := newBatcher(t, 2048, 8, 1000, 32)
	shared := tokens(1, 4000)
	submit(t, b, request(1, append(slices.Clone(shared), tokens(1e6, 20)...), 5, 32))
	all := slices.Clone(b.Step(0))
	if all[0].Kind != Admitted || all[0].Request.ID != 1 {
		t.Fatalf("first event %+v", all[0])
	}
	d := b.NextStepDuration()
	submit(t, b, request(2, append(slices.Clone(shared), tokens(2e6, 10)...), 5, 32))
	submit(t, b, request(3, append(slices.Clone(shared), tokens(3e6, 10)...), 5, 32))
	all = append(all, drain(b, d)...)
	cached, first := admitted(all), firstToken(all)
	if cached[1] != 0 || cached[2] != 4000 || cached[3] != 4000 {
		t.Errorf("cached %v, want 0, 4000, 4000", cached)
	}
	if first[1] == 0 || first[2] < first[1] || first[3] != first[2] || first[2] > first[1]+ms(100) {
		t.Errorf("first tokens at %v", first)
	}
}

// TestAbortKeepsThePrefix aborts a request of 3000 tokens while it is decoded:
// 2976 of them, all full blocks of 32, are hit afterwards.
func TestAbortKeepsThePrefix(t *testing.T) {
	b, c := newBatcher(t, 4096, 8, 1000, 32)
	prompt := tokens(1, 3000)
	submit(t, b, request(1, prompt, 500, 32))
	now := time.Duration(0)
	for range 10 {
		b.Step(now)
		now += b.NextStepDuration()
	}
	if !b.Abort(1) || b.Abort(1) {
		t.Fatal("a running request is aborted once")
	}
	if n := c.Counts(); n.Used != 0 || b.Running() != 0 {
		t.Errorf("%d blocks are held by %d requests after the abort", n.Used, b.Running())
	}
	submit(t, b, request(2, prompt, 1, 32))
	if cached := admitted(drain(b, now)); cached[2] != 2976 {
		t.Errorf("cached %v, want 2976", cached)
	}
}

// TestQueueIsFair has a large request at the head of the queue that must wait for
// memory. A small one behind it does not overtake, and both run in the end.
func TestQueueIsFair(t *testing.T) {
	b, _ := newBatcher(t, 512, 8, 20, 16)
	submit(t, b, request(1, tokens(1, 160), 20, 16))
	b.Step(0)
	submit(t, b, request(2, tokens(1000, 200), 20, 16))
	submit(t, b, request(3, tokens(2000, 16), 2, 16))
	first := firstToken(drain(b, b.NextStepDuration()))
	if len(first) != 3 || first[2] < first[1] || first[3] < first[2] {
		t.Errorf("first tokens at %v", first)
	}
}

// TestQueueGoesOnAfterAnAbort takes the request away that blocks the queue: the
// one behind it is admitted with the next step, though no block came free.
func TestQueueGoesOnAfterAnAbort(t *testing.T) {
	b, _ := newBatcher(t, 512, 8, 20, 16)
	submit(t, b, request(1, tokens(1, 160), 60, 16))
	submit(t, b, request(2, tokens(1000, 200), 20, 16))
	submit(t, b, request(3, tokens(2000, 16), 2, 16))
	b.Step(0)
	b.Step(1)
	if b.Running() != 1 || !b.Abort(2) {
		t.Fatalf("%d run, %d wait", b.Running(), b.Waiting())
	}
	if b.Step(2); b.Running() != 2 {
		t.Errorf("%d run, %d wait", b.Running(), b.Waiting())
	}
}

// TestSubmitRefuses has what can never run.
func TestSubmitRefuses(t *testing.T) {
	b, _ := newBatcher(t, 512, 8, 10, 16)
	submit(t, b, request(1, tokens(1, 10), 151, 16))
	for want, r := range map[error]*Request{
		ErrTooLarge:  request(2, tokens(1, 10), 152, 16),
		ErrEmpty:     request(3, nil, 1, 16),
		ErrDuplicate: request(1, tokens(1, 10), 1, 16),
	} {
		if err := b.Submit(r); !errors.Is(err, want) {
			t.Errorf("error %v, want %v", err, want)
		}
	}
}

// TestDragSlowsSteps has a request that makes each of its steps ten times longer.
func TestDragSlowsSteps(t *testing.T) {
	b, _ := newBatcher(t, 4096, 8, 1000, 16)
	r := request(1, tokens(1, 100), 1, 16)
	r.Drag = 10
	submit(t, b, r)
	b.Step(0)
	want := ms(10 * (8 + 0.04*100 + 1.5e-6*100*50))
	if got := b.NextStepDuration(); (got - want).Abs() > time.Microsecond {
		t.Errorf("step took %v, want %v", got, want)
	}
}

// fate is what a test knows of a request.
type fate struct {
	admitted, ended bool
	tokens, answer  int
}

// world is a batcher with all that was ever asked of it.
type world struct {
	t     *testing.T
	b     *Batcher
	c     *cache.Cache
	now   time.Duration
	fates map[uint64]*fate
	live  []uint64
	order uint64 // the last one admitted
}

const (
	worldBudget  = 64
	worldRunning = 8
	worldBlocks  = 64
	worldSize    = 4
)

func newWorld(t *testing.T) *world {
	b, c := newBatcher(t, worldBudget, worldRunning, worldBlocks, worldSize)
	return &world{t: t, b: b, c: c, fates: map[uint64]*fate{}}
}

// step makes a step and checks what it says against what is known.
func (w *world) step() {
	w.now += w.b.NextStepDuration()
	for _, e := range w.b.Step(w.now) {
		f := w.fates[e.Request.ID]
		switch {
		case f == nil || f.ended || e.At != w.now:
			w.t.Fatalf("event %+v for a request that has ended", e)
		case e.Kind == Admitted:
			if f.admitted || e.Request.ID < w.order {
				w.t.Fatalf("request %d admitted again or out of turn", e.Request.ID)
			}
			f.admitted, w.order = true, e.Request.ID
			if n := len(e.Request.Prompt.Tokens); e.Cached%worldSize != 0 || e.Cached >= n {
				w.t.Fatalf("%d of %d tokens cached", e.Cached, n)
			}
		case !f.admitted || e.Index != f.tokens:
			w.t.Fatalf("token %d of request %d, want %d", e.Index, e.Request.ID, f.tokens)
		default:
			f.tokens++
			if e.Last != (f.tokens == f.answer) {
				w.t.Fatalf("last is %v at token %d of %d", e.Last, f.tokens, f.answer)
			}
			f.ended = e.Last
		}
	}
	if d := w.b.NextStepDuration(); d > DefaultStepModel.duration(work{tokens: worldBudget, attention: 1e6, context: 1e6}) {
		w.t.Fatalf("a step of %v is over the budget", d)
	}
	if w.b.Running() > worldRunning {
		w.t.Fatalf("%d requests run", w.b.Running())
	}
	if n := w.c.Counts(); n.Empty+n.Used+n.Cached != worldBlocks || n.Used > 0 != (w.b.Running() > 0) {
		w.t.Fatalf("blocks %+v with %d requests running", n, w.b.Running())
	}
}

// end lets everything run out: all that was asked for has ended, and no block is
// held.
func (w *world) end() {
	for n := 0; w.b.Running()+w.b.Waiting() > 0; n++ {
		if n > 100_000 {
			w.t.Fatalf("%d running and %d waiting never end", w.b.Running(), w.b.Waiting())
		}
		w.step()
	}
	for id, f := range w.fates {
		if !f.ended {
			w.t.Fatalf("request %d was lost: %+v", id, *f)
		}
	}
	if n := w.c.Counts(); n.Used != 0 || len(w.b.byID) != 0 {
		w.t.Fatalf("%+v, %d requests at the end", n, len(w.b.byID))
	}
}

// TestNoRequestIsLost submits, aborts and steps at random, with an engine that
// starts again now and then.
func TestNoRequestIsLost(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	w, id := newWorld(t), uint64(0)
	finished, aborted, hits := 0, 0, 0
	for i := range operations {
		if i%(operations/20) == operations/20-1 {
			if rng.IntN(2) == 0 {
				w.end()
			}
			w = newWorld(t)
		}
		switch n := rng.IntN(16); {
		case n < 3 && w.b.Waiting() < 20:
			id++
			prompt := make([]uint32, 1+rng.IntN(100))
			for i := range prompt {
				if i%16 == 0 {
					prompt[i] = uint32(rng.IntN(3))
				}
			}
			r := request(id, prompt, 1+rng.IntN(30), worldSize)
			hits += w.c.Hit(r.Prompt)
			submit(t, w.b, r)
			w.fates[id] = &fate{answer: len(r.Answer)}
			w.live = append(w.live, id)
		case n == 3 && len(w.live) > 0:
			j := rng.IntN(len(w.live))
			f := w.fates[w.live[j]]
			if w.b.Abort(w.live[j]) == f.ended {
				t.Fatalf("request %d: aborted after its end, or not although it was there", w.live[j])
			}
			if f.ended {
				finished++
			} else {
				aborted++
			}
			f.ended = true
			w.live = slices.Delete(w.live, j, j+1)
		default:
			w.step()
		}
	}
	w.end()
	if finished == 0 || aborted == 0 || hits == 0 {
		t.Errorf("%d finished, %d aborted, %d tokens hit: nothing was tried", finished, aborted, hits)
	}
}
