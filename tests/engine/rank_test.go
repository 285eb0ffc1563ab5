package engine

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
)

// TestLateRankKeepsTheOrderOfTime has a rank that gets to run only long after its
// steps were due. What arrived in the meantime is admitted no earlier than it
// arrived, and the times are those of a rank that was never late.
func TestLateRankKeepsTheOrderOfTime(t *testing.T) {
	start := func() (*rank, []*job) {
		kv := cache.New(100, 16, nil)
		b, err := batch.New(batch.Config{TokenBudget: 512, MaxRunning: 8, Step: batch.DefaultStepModel}, kv)
		if err != nil {
			t.Fatal(err)
		}
		var jobs []*job
		for i := range 3 {
			p := cache.NewPrompt(cache.Root{}, words(uint64(i), 0, 64), 16)
			j := newJob(&batch.Request{ID: uint64(i), Prompt: p, Answer: make([]uint32, 5)}, false)
			// The third comes when the others have long ended.
			j.arrived = []time.Duration{0, 15 * time.Millisecond, time.Second}[i]
			jobs = append(jobs, j)
		}
		return newRank(clock{time.Now(), 1}, kv, b, nil), jobs
	}
	late, a := start()
	late.inbox = append(late.inbox, a...)
	if _, busy := late.advance(10 * time.Second); busy {
		t.Error("busy at the end")
	}
	prompt, b := start()
	for now := time.Duration(0); now < 2*time.Second; now += time.Millisecond / 10 {
		for len(b) > 0 && b[0].arrived <= now {
			prompt.inbox = append(prompt.inbox, b[0])
			b = b[1:]
		}
		prompt.advance(now)
	}
	if late.lag < time.Second || prompt.lag > time.Millisecond {
		t.Errorf("lag %v of the late one, %v of the other", late.lag, prompt.lag)
	}
	for i, j := range a {
		if p := j.look(); !p.done || p.admitted < j.arrived || p.first <= p.admitted {
			t.Errorf("job %d arrived at %v: %+v", i, j.arrived, p)
		}
	}
	if late.stats.ttft.sum != prompt.stats.ttft.sum || late.stats.e2e.sum != prompt.stats.e2e.sum {
		t.Errorf("first tokens took %v s when late, %v s else", late.stats.ttft.sum, prompt.stats.ttft.sum)
	}
}

func BenchmarkChunk(b *testing.B) {
	c := &call{chat: true, id: "chatcmpl-1", model: "sim-8b", answer: words(1, 2, 100), reason: "stop", prompt: &cache.Prompt{}}
	a := &answer{call: c, blockSize: 16}
	var buf []byte
	for b.Loop() {
		buf = a.appendChunk(buf[:0], 5, 0)
	}
}
