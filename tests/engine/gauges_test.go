package engine

import (
	"context"
	"fmt"
	"testing"
)

// TestLoadGauges reads the gauges of a rank that runs two requests and lets three
// wait, and those of one that is idle.
func TestLoadGauges(t *testing.T) {
	const running, waiting, blocks = 2, 3, 300
	// So many blocks that the requests last for seconds, and longer than the test
	// needs; they are held from admission on.
	const prompt, answer = 50, 2000
	const used = running * ((prompt + answer - 1 + 15) / 16)
	e := start(t, Config{Ranks: 2, MaxRunning: running, Blocks: blocks, Speed: 1})
	ctx, leave := context.WithCancel(t.Context())
	done := make(chan reply, running+waiting)
	for i := range running + waiting {
		body := doc{"prompt": tokens(1000*i, prompt), "max_tokens": answer, "ignore_eos": true}
		go func() { done <- post(ctx, e.completionURL(), body, "X-data-parallel-rank", "1") }()
	}
	defer func() {
		leave()
		for range running + waiting {
			<-done
		}
	}()
	of := func(rank int, name, more string) string {
		return fmt.Sprintf(`vllm:%s{engine="%d",model_name="sim-8b"%s}`, name, rank, more)
	}
	want := map[string]float64{
		of(1, "num_requests_running", ""):                             running,
		of(1, "num_requests_waiting", ""):                             waiting,
		of(1, "num_requests_waiting_by_reason", `,reason="capacity"`): waiting,
		of(1, "num_requests_waiting_by_reason", `,reason="deferred"`): 0,
		of(1, "kv_cache_usage_perc", ""):                              float64(used) / blocks,
		of(0, "num_requests_running", ""):                             0,
		of(0, "num_requests_waiting", ""):                             0,
		of(0, "num_requests_waiting_by_reason", `,reason="capacity"`): 0,
		of(0, "kv_cache_usage_perc", ""):                              0,
	}
	var got map[string]float64
	defer func() {
		if t.Failed() {
			for key, v := range want {
				t.Logf("%s is %v, want %v", key, got[key], v)
			}
		}
	}()
	eventually(t, "the page has the load", func() bool {
		got = series(t, string(get(t.Context(), e.URL()+"/metrics").body))
		for key, v := range want {
			if now, ok := got[key]; !ok || now != v {
				return false
			}
		}
		return true
	})
	s := e.State().Ranks
	if s[1].Running != running || s[1].Waiting != waiting || s[1].UsedBlocks != used || s[1].EmptyBlocks+s[1].UsedBlocks+s[1].CachedBlocks != blocks {
		t.Errorf("state %+v", s[1])
	}
	if s[0].Running != 0 || s[0].Waiting != 0 || s[0].UsedBlocks != 0 {
		t.Errorf("state of the idle rank %+v", s[0])
	}
}
