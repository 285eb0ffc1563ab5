package pool

import (
	"sync"
	"time"
)

// budgetWindow is the time in which retries are compared with requests, in seconds.
const budgetWindow = 10

// spending counts a pool's requests and charged retries, second by second.
type spending struct {
	mu      sync.Mutex
	seconds [budgetWindow]secondCount // a ring
}

type secondCount struct {
	second            int64 // Unix time
	requests, retries int
}

// at returns the counts of the second of now. The caller holds the lock.
func (s *spending) at(now time.Time) *secondCount {
	second := now.Unix()
	c := &s.seconds[second%budgetWindow]
	if c.second != second {
		*c = secondCount{second: second}
	}
	return c
}

// Request counts a request.
func (s *spending) Request(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at(now).requests++
}

// retry charges one more retry to the budget, unless that would exceed it.
func (s *spending) retry(now time.Time, b *RetryBudget) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isSpent(now, b) {
		return false
	}
	s.at(now).retries++
	return true
}

// Spent returns whether the budget has no room for one more retry.
func (s *spending) Spent(now time.Time, b *RetryBudget) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isSpent(now, b)
}

// isSpent is Spent. The caller holds the lock.
func (s *spending) isSpent(now time.Time, b *RetryBudget) bool {
	requests, retries := s.lately(now)
	return float64(retries) >= b.Percent/100*float64(requests)+b.PerSecond*budgetWindow
}

// lately returns the sums over the window that ends now. The caller holds the lock.
func (s *spending) lately(now time.Time) (requests, retries int) {
	last := now.Unix()
	for _, c := range s.seconds {
		if c.second > last-budgetWindow && c.second <= last {
			requests += c.requests
			retries += c.retries
		}
	}
	return requests, retries
}

const incidentBudget = "retry budget spent"

// MayRetry charges one more retry to the pool's budget, unless that would exceed it.
func (p *Pool) MayRetry(t time.Time) bool {
	if p.Spending.retry(t, p.Settings.Load().RetryBudget) {
		return true
	}
	retriesDenied.WithLabelValues(p.Name).Inc()
	p.Incidents.Raise(t, incidentBudget, p.Logger)
	return false
}
