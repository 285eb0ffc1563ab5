package tests

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"
)

// TestFloodOfOneTenant has 64 clients of one tenant with prompts of 2,500 words beside five others with short
// ones. Two engines compute about one such prompt at a time. With hold, the others wait for about two of
// these prompts, and not for all.
func TestFloodOfOneTenant(t *testing.T) {
	takesSeconds(t)
	mean := make(map[string]time.Duration)
	for _, hold := range []string{"off", "auto"} {
		s := startCaddy(t, fmt.Sprintf("kv_router %s {\npool flood_%s\ntenant {header.X-Org}\nqueue {\nhold %s\n}\n}", startComputing(t, 2), hold, hold))
		for range 30 {
			s.timed(t, essay(2500), "X-Org", "first")
		}
		alone := s.tenants(t, 3)
		ctx, cancel := context.WithCancel(t.Context())
		var flood sync.WaitGroup
		for range 64 {
			flood.Go(func() {
				for ctx.Err() == nil {
					s.chat(ctx, essay(2500), "X-Org", "flood")
				}
			})
		}
		time.Sleep(time.Second)
		mean[hold] = s.tenants(t, 4)
		cancel()
		flood.Wait()
		t.Logf("hold %s: %v beside the flood, %v alone", hold, mean[hold], alone)
	}
	if mean["auto"] > mean["off"]/2 {
		t.Errorf("mean times to the first token: %v", mean)
	}
}

// tenants has five tenants send n short streams each, and returns the mean time to the first token.
func (s *server) tenants(t *testing.T, n int) time.Duration {
	t.Helper()
	var mu sync.Mutex
	var sum time.Duration
	var all sync.WaitGroup
	for i := range 5 {
		all.Go(func() {
			for range n {
				a, took := s.timed(t, essay(20), "X-Org", fmt.Sprint("tenant ", i))
				if !a.ok() {
					t.Errorf("status %d: %.200s", a.status, a.body)
				}
				mu.Lock()
				sum += took
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return (sum / time.Duration(5*n)).Round(time.Millisecond)
}
