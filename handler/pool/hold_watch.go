package pool

import "time"

const (
	// holdWindow is how long the rate of prefills is measured while requests are held.
	holdWindow = 10 * time.Second
	// holdSilence is how long no first token may come while requests are held, and letGoFor how long nothing
	// is held after that.
	holdSilence, letGoFor = 15 * time.Second, time.Minute
	// deepenAgain is the time between two trials of another depth.
	deepenAgain = 5 * time.Minute
	// deeper is the ratio of rates by which more in the engines must pay, and shallower that which less may cost.
	deeper, shallower = 1.15, 0.97
	// maxDepth bounds the depth.
	maxDepth = 64

	incidentHold = "no first token comes while requests are held, and the router lets them go"
)

// holdWatch checks that holding requests does not keep engines idle. An engine may compute more prompts at
// once than is known of it. So the router tries twice the depth now and then, and keeps it if more tokens are
// then prefilled in a second. If none are, it lets all requests go for a while. Only the upkeep uses it.
type holdWatch struct {
	*Pool
	base, depth int64 // in steps; they differ during a trial
	down        bool  // the next trial is of half the depth
	next        time.Time
	rate        float64 // of base, in tokens a second

	began time.Time // the window; zero: nothing was held then
	from  int64     // tokens prefilled until then
	heard time.Time // when a first token last came, or nothing was held
	seen  int64     // tokens prefilled until then
}

func (h *holdWatch) check(t time.Time) {
	n, held := h.Scheduler.Prefilled(), h.queue.isHolding()
	if n != h.seen || !held {
		h.seen, h.heard = n, t
	}
	switch {
	case !held:
		h.set(h.base)
		h.began = time.Time{}
	case t.Sub(h.heard) >= holdSilence:
		h.heard = t
		h.loose.Store(t.Add(letGoFor).UnixNano())
		h.Raise(t, incidentHold)
		h.queue.reviewAll()
	case h.began.IsZero():
		h.began, h.from = t, n
	case t.Sub(h.began) >= holdWindow:
		h.compare(t, float64(n-h.from)/t.Sub(h.began).Seconds())
		h.began, h.from = t, n
	}
}

// compare ends a window with its rate, and may begin or end a trial.
func (h *holdWatch) compare(t time.Time, rate float64) {
	switch {
	case h.depth > h.base && rate > deeper*h.rate, h.depth < h.base && rate > shallower*h.rate:
		h.base, h.rate, h.next = h.depth, rate, t
	case h.depth != h.base:
		h.set(h.base)
		h.down, h.next = !h.down, t.Add(deepenAgain)
		return
	default:
		h.rate = rate
	}
	switch {
	case t.Before(h.next):
	case h.down && h.base > 1:
		h.set(h.base / 2)
	case h.base < maxDepth:
		h.set(2 * h.base)
	}
}

func (h *holdWatch) set(depth int64) {
	if h.depth != depth {
		h.depth = depth
		h.Scheduler.SetDepth(depth)
		h.queue.reviewAll()
	}
}

// isHolding returns whether requests wait for room.
func (q *waiters) isHolding() bool {
	if q.length.Load() == 0 {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	t := time.Now()
	for _, l := range q.lanes {
		if !l.background && l.isHeld(t) {
			return true
		}
	}
	return false
}
