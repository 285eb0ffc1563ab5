package pool

import (
	"sync"
	"time"
)

// apartMemory is how long answers count in [Apart].
const apartMemory = 2 * time.Minute

// Apart counts the answers of a worker, and the odd ones among them: errors and empty answers.
// They mark no worker down, because clients may have caused them. But a worker that has far more
// of them than the others for the same model probably serves something else, or is broken.
type Apart struct {
	mu     sync.Mutex
	recent fading    // all answers, and the odd ones
	last   time.Time // when they were last far above those of others
}

// add counts an answer, and returns the odd ones and their share.
func (a *Apart) add(now time.Time, odd bool) (n, share float64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.recent.to(now, apartMemory)
	if r.all++; odd {
		r.some++
	}
	return r.some, r.some / r.all
}

// Share returns the share of odd answers in the recent ones. apart says that it was far above
// that of others within the last minute.
func (a *Apart) Share(now time.Time) (share float64, apart bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.recent.some / max(a.recent.all, 1), now.Sub(a.last) < incidentEnd
}

// compare records the last answer of a worker, and compares odd ones with its peers'.
func (p *Pool) compare(w *Worker, t time.Time, o *Outcome) {
	n, share := w.Apart.add(t, o.Odd)
	if !o.Odd || n < fewErrors {
		return
	}
	theirs, peers := 0.0, 0
	for _, row := range o.Peers {
		if row.Worker != w && !row.Repeated {
			s, _ := row.Worker.Apart.Share(t)
			theirs += s
			peers++
		}
	}
	if peers == 0 || !worse(n, share, theirs/float64(peers)) {
		return
	}
	w.Apart.mu.Lock()
	w.Apart.last = t
	w.Apart.mu.Unlock()
	p.Incidents.Raise(t, "a worker answers with errors or nothing, unlike the others", p.Logger)
}
