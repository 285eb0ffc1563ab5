package handler

import (
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/zeebo/xxh3"
)

const (
	// substantial is the least prediction, in tokens, that shows anything.
	substantial = 512
	// confirmations is how many predictions must have come true since the mirror
	// was cleared last, before any are believed to be wrong for want of a cache:
	// where they never fit, clearing helps nothing.
	confirmations = 3
	// fewMisses is how many predictions in a row must be wrong, and manyMisses
	// how many at most, as this grows with each time that a mirror was cleared.
	fewMisses, manyMisses = 5, 80
	// fewPrompts is how many prompts or sessions these must be of.
	fewPrompts = 3
	// forgiven is after how long it does not count that a mirror was cleared.
	forgiven = time.Hour
)

// doubts compare what a worker was thought to have cached with what it reports.
// An engine that has restarted unseen, or was told to flush its cache, reports
// far less from then on, for all prompts alike.
type doubts struct {
	mu        sync.Mutex
	confirmed int
	misses    int // in a row
	prompts   [fewPrompts]uint64
	different int       // of prompts
	cleared   time.Time // last, whyever
	doubted   time.Time // last cleared by doubts
	needed    int       // misses for that; 0 = fewMisses
	reports   map[reportKind]bool
}

// reportKind is a kind of answer. Which of them report what was cached depends on
// the engine's version: of what one kind says, nothing follows for others.
type reportKind struct {
	api    string
	stream bool
}

// reset takes in that the mirror was cleared.
func (d *doubts) reset(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.confirmed, d.misses, d.different, d.cleared = 0, 0, 0, t
	d.reports = nil // it may be another version
}

// reported takes in whether an answer of a kind reports what was cached, and
// tells whether any did.
func (d *doubts) reported(kind reportKind, does bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if does && !d.reports[kind] {
		if d.reports == nil {
			d.reports = make(map[reportKind]bool)
		}
		d.reports[kind] = true
	}
	return does || d.reports[kind]
}

// compare takes in how many tokens of a prompt a worker was thought to hold when
// an attempt began, and how many it reports to have had cached. It tells whether
// the mirror must be wrong as a whole.
func (d *doubts) compare(now, begun time.Time, prompt uint64, predicted, reported int64) bool {
	if predicted < substantial {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case begun.Before(d.cleared):
		return false
	case reported*4 >= predicted*3:
		d.confirmed++
		d.misses, d.different = 0, 0
		return false
	case reported*2 >= predicted || predicted-reported < substantial || d.confirmed < confirmations:
		return false
	}
	d.miss(prompt)
	if now.Sub(d.doubted) > forgiven {
		d.needed = fewMisses
	}
	if d.misses < d.needed || d.different < fewPrompts {
		return false
	}
	d.doubted, d.needed = now, min(2*d.needed, manyMisses)
	return true
}

// miss counts a prediction that was wrong. The lock is held.
func (d *doubts) miss(prompt uint64) {
	d.misses++
	if d.different < fewPrompts && !slices.Contains(d.prompts[:d.different], prompt) {
		d.prompts[d.different] = prompt
		d.different++
	}
}

// cachedTokens returns what the engine had cached of the prompt by what it
// reports, -1 if that is not known. SGLang leaves the count out where it is 0, and
// where a kind of answer has none: the former holds where the kind has one else.
func (o *observer) cachedTokens(reported int64) int64 {
	w := o.attempt.worker
	if w.engine.last().Type != engine.SGLang {
		return reported
	}
	if !w.doubts.reported(reportKind{o.rt.plan.api.Name(), o.stream}, reported >= 0) {
		return -1
	}
	return max(reported, 0)
}

// promptKey tells prompts apart: by their session, or by all that they say, for
// many end alike.
func (rt *route) promptKey() uint64 {
	if rt.plan.session.key != "" {
		return xxh3.HashString(rt.plan.session.key)
	}
	key := rt.plan.score.Root
	for _, b := range rt.plan.score.Blocks {
		key = (bits.RotateLeft64(key, 5) ^ b) * 0x9e3779b97f4a7c15
	}
	return key
}
