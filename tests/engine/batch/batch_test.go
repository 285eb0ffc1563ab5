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

func newBatcher(budget, running, blocks, size int) *Batcher {
	return New(Config{TokenBudget: budget, MaxRunning: running, Step: DefaultStepModel}, cache.New(blocks, size, nil))
}

// submit submits a request.
func submit(b *Batcher, prompt []uint32, answer, size int) *Request {
	r := &Request{Prompt: cache.NewPrompt(cache.Root{}, prompt, size), Answer: tokens(1<<20, answer)}
	b.Submit(r)
	return r
}

// result is when a request had its first token, and how many tokens were cached.
type result struct {
	first  time.Duration
	cached int
}

// drain steps until nothing is left.
func drain(b *Batcher) map[*Request]result {
	out := make(map[*Request]result)
	for now := b.NextStepDuration(); ; now += b.NextStepDuration() {
		for _, e := range b.Step(now) {
			switch r := out[e.Request]; e.Tokens {
			case 0:
				out[e.Request] = result{cached: e.Cached}
			case 1:
				out[e.Request] = result{now, r.cached}
			}
		}
		if b.NextStepDuration() == 0 {
			return out
		}
	}
}

func ms(x float64) time.Duration { return time.Duration(x * float64(time.Millisecond)) }

// TestStepTime has one request alone: a prefill in two chunks, then decodes.
func TestStepTime(t *testing.T) {
	b := newBatcher(4096, 8, 1000, 16)
	submit(b, tokens(1, 5000), 3, 16)
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
	b := newBatcher(2048, 8, 1000, 32)
	shared := tokens(1, 4000)
	one := submit(b, append(slices.Clone(shared), tokens(1e6, 20)...), 5, 32)
	if all := b.Step(0); len(all) != 1 || all[0] != (Event{Request: one}) {
		t.Fatalf("first events %+v", all)
	}
	two := submit(b, append(slices.Clone(shared), tokens(2e6, 10)...), 5, 32)
	three := submit(b, append(slices.Clone(shared), tokens(3e6, 10)...), 5, 32)
	all := drain(b)
	if all[two].cached != 4000 || all[three].cached != 4000 {
		t.Errorf("cached %d and %d, want 4000", all[two].cached, all[three].cached)
	}
	first := all[one].first
	if first == 0 || all[two].first < first || all[three].first != all[two].first || all[two].first > first+ms(100) {
		t.Errorf("first tokens at %v, %v and %v", first, all[two].first, all[three].first)
	}
}

// TestQueueIsFair has a large request at the head of the queue that must wait for
// memory. A small one behind it does not overtake, and both run in the end.
func TestQueueIsFair(t *testing.T) {
	b := newBatcher(512, 8, 20, 16)
	one := submit(b, tokens(1, 160), 20, 16)
	b.Step(0)
	two, three := submit(b, tokens(1000, 200), 20, 16), submit(b, tokens(2000, 16), 2, 16)
	all := drain(b)
	if first := all[one].first; first == 0 || all[two].first < first || all[three].first < all[two].first {
		t.Errorf("first tokens at %v, %v and %v", first, all[two].first, all[three].first)
	}
}
