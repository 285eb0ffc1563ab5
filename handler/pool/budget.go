package pool

import (
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
)

// budgetMemory is how long the budget compares retries with requests.
const budgetMemory = 10 * time.Second

// spending counts a pool's requests and its charged retries.
type spending struct {
	mu     sync.Mutex
	recent observe.Decaying // requests, and the retries beside them
}

// Request counts a request.
func (s *spending) Request(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recent.To(now, budgetMemory).All++
}

// retry charges one more retry to the budget, unless that would exceed it.
func (s *spending) retry(now time.Time, b *RetryBudget) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isSpent(now, b) {
		return false
	}
	s.recent.Some++
	return true
}

// Spent returns whether the budget has no room for one more retry.
func (s *spending) Spent(now time.Time, b *RetryBudget) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isSpent(now, b)
}

// isSpent is Spent: there is less than a twentieth of a retry left, or half of a small budget. The caller
// holds the lock.
func (s *spending) isSpent(now time.Time, b *RetryBudget) bool {
	r := s.recent.To(now, budgetMemory)
	most := b.Percent/100*r.All + b.PerSecond*budgetMemory.Seconds()
	return most <= 0 || r.Some > most-min(0.05, most/2)
}
