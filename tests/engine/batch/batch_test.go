package batch

import (
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
