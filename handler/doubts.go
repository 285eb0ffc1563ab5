package handler

import (
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
}

// reset takes in that the mirror was cleared.
func (d *doubts) reset(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.confirmed, d.misses, d.different, d.cleared = 0, 0, 0, t
}

// proven tells whether predictions have come true.
func (d *doubts) proven() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.confirmed > 0
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

// verify compares a prediction with the counts that the engine reports, in
// tokens; cached is negative if it reports none.
func (o *observer) verify(prompt, cached int64) {
	a, score := o.attempt, &o.rt.plan.score
	if score.Tokens == 0 || prompt <= 0 {
		return
	}
	if cached < 0 {
		// SGLang leaves it out where it is 0, and says it else
		if a.worker.engine.last().Type != engine.SGLang || !a.worker.doubts.proven() {
			return
		}
		cached = 0
	}
	// What is being computed for others may or may not be found, by the engine.
	size := int64(o.rt.pool.settings.Load().blockSize)
	predicted := a.terms.OverlapTokens
	if cached*4 < predicted*3 {
		predicted -= int64(a.terms.SharedBlocks) * size
	}
	predicted = min(predicted, score.Tokens) * prompt / score.Tokens // tokens are estimated where the prompt is text
	if a.worker.doubts.compare(now(), a.begun, o.rt.promptKey(), predicted, cached) {
		o.rt.pool.clear(a.worker, clearedMismatch)
		a.worker.engine.askAgain()
	}
}

// promptKey tells prompts apart: by their session, or by what was predicted.
func (rt *route) promptKey() uint64 {
	if rt.plan.session != "" {
		return xxh3.HashString(rt.plan.session)
	}
	if n := len(rt.plan.score.Blocks); n > 0 {
		return rt.plan.score.Root ^ rt.plan.score.Blocks[n-1]
	}
	return rt.plan.score.Root
}
