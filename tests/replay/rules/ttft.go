package rules

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// MinTTFT takes the lowest predicted time to the first token, as Mooncake's
// conductor does. This is the predicted time of the prefills placed on a target
// and not over, less what the first of them has run. The time of what the prompt
// lacks there is added. It predicts with the engine model's true constants, but
// neither sees the decoding beside a prefill nor knows which engine is slow.
type MinTTFT struct {
	View *View
	least
	waits []wait
}

// LeastWork takes the shortest wait; among equal ones the fewest requests. It is the
// placement of the references that share one cache.
type LeastWork struct{ MinTTFT }

// wait is the predicted prefill time on one target.
type wait struct {
	placed []placed
	ms     float64       // of all placed
	since  time.Duration // when the first of them could begin
}

type placed struct {
	request int
	ms      float64
}

// Choose implements kvscore.Policy.
func (m *MinTTFT) Choose(s *kvscore.Selection) int {
	m.waits = grown(m.waits, len(s.Candidates))
	return m.choose(s, func(i int) float64 { return m.waits[i].left(m.View.Now) + m.predict(s, i) })
}

// Choose implements kvscore.Policy.
func (l *LeastWork) Choose(s *kvscore.Selection) int {
	l.waits = grown(l.waits, len(s.Candidates))
	const little = 1e-6 // of a request: any wait weighs more
	return l.choose(s, func(i int) float64 {
		return l.waits[i].left(l.View.Now) + little*float64(s.Candidates[i].Requests)
	})
}

// predict returns the prefill time of the request on candidate i.
func (m *MinTTFT) predict(s *kvscore.Selection, i int) float64 {
	cached := m.View.cached(s, i)
	return m.View.Model.PrefillMS(int(cached), int(s.Tokens-cached))
}

// Placed implements Observer.
func (m *MinTTFT) Placed(s *kvscore.Selection, request, at int) {
	m.waits = grown(m.waits, len(s.Candidates))
	w, own := &m.waits[at], m.predict(s, at)
	if len(w.placed) == 0 {
		w.since, w.ms = m.View.Now, 0 // what is left is rounding
	}
	w.placed = append(w.placed, placed{request, own})
	w.ms += own
}

// FirstToken implements Observer.
func (m *MinTTFT) FirstToken(request, at int) {
	w := &m.waits[at]
	for i, p := range w.placed { // engines serve in order: it is the first
		if p.request == request {
			w.ms -= p.ms
			w.placed = append(w.placed[:i], w.placed[i+1:]...)
			break
		}
	}
	w.since = m.View.Now
}

// left returns the predicted time until all prefills are over, in milliseconds.
func (w *wait) left(now time.Duration) float64 {
	if len(w.placed) == 0 {
		return 0
	}
	ran := float64(now-w.since) / float64(time.Millisecond)
	return max(0, w.ms-min(ran, w.placed[0].ms))
}
