package handler

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// budgetWindow is the time over which retries are compared with requests, in
// seconds.
const budgetWindow = 10

// spending counts a pool's requests and the retries that were charged to its
// budget, second by second. Requests are counted without a lock.
type spending struct {
	seconds [16]atomic.Uint64 // more than the window, so that none is reused within it
	mu      sync.Mutex        // one retry is decided on at a time
}

// What one second's count consists of, from the lowest bit: retries, requests,
// and which second it is, modulo 2^20, which are twelve days.
const (
	retryBits   = 20
	requestBits = 24
	oneRetry    = 1
	oneRequest  = 1 << retryBits
	maxRetries  = oneRequest - 1
	maxRequests = 1<<requestBits - 1
	secondShift = retryBits + requestBits
	secondMask  = 1<<(64-secondShift) - 1
)

// add counts one more in the second of now.
func (s *spending) add(now time.Time, one uint64) {
	second := uint64(now.Unix()) & secondMask //nolint:gosec // after 1970
	slot := &s.seconds[second%uint64(len(s.seconds))]
	for {
		old := slot.Load()
		sum := old
		if kept := old >> secondShift; kept != second {
			if old != 0 && (kept-second)&secondMask <= secondMask/2 {
				return // who counts came so late that another second is counted here
			}
			sum = second << secondShift // of a second that is long over
		}
		if one == oneRequest && sum>>retryBits&maxRequests == maxRequests || one == oneRetry && sum&maxRetries == maxRetries {
			return // a count must not run over into the next
		}
		if slot.CompareAndSwap(old, sum+one) {
			return
		}
	}
}

// request counts a request.
func (s *spending) request(now time.Time) { s.add(now, oneRequest) }

// retry tells whether the budget has room for one more retry, and charges it.
func (s *spending) retry(now time.Time, b retryBudget) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.spent(now, b) {
		return false
	}
	s.add(now, oneRetry)
	return true
}

// spent tells whether the budget has no room for one more.
func (s *spending) spent(now time.Time, b retryBudget) bool {
	requests, retries := s.lately(now)
	return float64(retries) >= b.percent/100*float64(requests)+b.rate*budgetWindow
}

// lately returns the sums over the window that ends now.
func (s *spending) lately(now time.Time) (requests, retries uint64) {
	last := uint64(now.Unix()) //nolint:gosec // after 1970
	for back := range uint64(budgetWindow) {
		second := (last - back) & secondMask
		if n := s.seconds[second%uint64(len(s.seconds))].Load(); n>>secondShift == second {
			requests += n >> retryBits & maxRequests
			retries += n & maxRetries
		}
	}
	return requests, retries
}

const budgetSpent = "retry budget spent"

// mayRetry tells whether the pool's budget has room for one more retry, and
// charges it.
func (p *pool) mayRetry(t time.Time) bool {
	if p.spending.retry(t, p.settings.Load().retries) {
		return true
	}
	theMetrics().denied.WithLabelValues(p.name).Inc()
	p.incidents.met(t, budgetSpent, p.logger)
	return false
}

// stays tells whether a request cannot be made on another worker: none is left,
// it has broken on one already, or the budget is spent.
func (rt *route) stays() bool {
	return !rt.otherLeft() || rt.lastSuspect() || rt.pool.spending.spent(now(), rt.pool.settings.Load().retries)
}

// affordable tells whether the budget allows that an attempt is made again that
// ended with err, nil after an answer. A connection that could not be made is
// not charged: it has cost no worker anything. Nor is what was paid for when the
// worker was found to hang.
func (rt *route) affordable(a *attempt, err error) bool {
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	return unconnected || a.moved || rt.pool.mayRetry(now())
}
