package pool

import (
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
)

// budgetMemory is how long the budget compares retries with requests.
const budgetMemory = 10 * time.Second

// budget is the retry budget of a pool: it counts requests and charged retries.
type budget struct {
	pool *registry

	mu     sync.Mutex
	recent observe.Decaying // requests, and the retries beside them
}

// Request counts a request.
func (b *budget) Request(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.recent.To(now, budgetMemory).Count++
}

// Charge charges one more retry to the budget, unless that would exceed it, and returns whether it did.
func (b *budget) Charge(now time.Time) bool {
	b.mu.Lock()
	spent := b.isSpent(now)
	if !spent {
		b.recent.Sum++
	}
	b.mu.Unlock()
	if spent {
		observe.RetryDenied(b.pool.Name, 1)
		b.pool.Raise(now, "retry budget spent")
	}
	return !spent
}

// Spent returns whether the budget has no room for one more retry.
func (b *budget) Spent(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.isSpent(now)
}

// isSpent is Spent: there is less than a twentieth of a retry left, or half of a small budget. The caller
// holds the lock.
func (b *budget) isSpent(now time.Time) bool {
	set, r := b.pool.Settings.Load().RetryBudget, b.recent.To(now, budgetMemory)
	most := set.Percent/100*r.Count + set.PerSecond*budgetMemory.Seconds()
	return most <= 0 || r.Sum > most-min(0.05, most/2)
}
