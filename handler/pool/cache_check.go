package pool

import (
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

const (
	// substantial is the least prediction, in tokens, that is compared.
	substantial = 512
	// confirmations is how many predictions must be right after the cache model was
	// cleared, before wrong ones count: if none ever is, clearing does not help.
	confirmations = 3
	// fewMisses is how many predictions in a row must be wrong to clear the cache
	// model. The number doubles with each time, up to manyMisses.
	fewMisses, manyMisses = 5, 80
	// fewPrompts is the least number of prompts or sessions with wrong predictions.
	fewPrompts = 3
	// forgiven is the time after which fewMisses counts again.
	forgiven = time.Hour
)

// cacheCheck compares what the router predicted a worker to have cached with what
// the worker's engine reports. An engine that has restarted unseen, or has flushed its
// cache, reports far less from then on, for all prompts.
type cacheCheck struct {
	mu        sync.Mutex
	confirmed int
	misses    int // in a row
	prompts   [fewPrompts]uint64
	different int       // number of prompts
	cleared   time.Time // last, for any reason
	failed    time.Time // last cleared by this check
	needed    int       // misses for that; 0 = fewMisses
	reports   map[ReportKind]bool
}

// ReportKind is a kind of answer. Which kinds report what was cached depends on the
// engine's version.
type ReportKind struct {
	Api    string
	Stream bool
}

// reset records that the cache model was cleared.
func (d *cacheCheck) reset(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.confirmed, d.misses, d.different, d.cleared = 0, 0, 0, t
	d.reports = nil // it may be another version
}

// reported records whether an answer of a kind reports what was cached, and returns
// whether any of that kind did.
func (d *cacheCheck) reported(kind ReportKind, does bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if does && !d.reports[kind] {
		if d.reports == nil {
			d.reports = make(map[ReportKind]bool)
		}
		d.reports[kind] = true
	}
	return does || d.reports[kind]
}

// compare records how many tokens of a prompt a worker was predicted to hold when an
// attempt began, and how many it reports. It returns whether the cache model must be
// wrong as a whole.
func (d *cacheCheck) compare(now, begun time.Time, prompt uint64, predicted, reported int64) bool {
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
	d.misses++
	if d.different < fewPrompts && !slices.Contains(d.prompts[:d.different], prompt) {
		d.prompts[d.different] = prompt
		d.different++
	}
	if now.Sub(d.failed) > forgiven {
		d.needed = fewMisses
	}
	if d.misses < d.needed || d.different < fewPrompts {
		return false
	}
	d.failed, d.needed = now, min(2*d.needed, manyMisses)
	return true
}

// CachedTokens returns how many tokens of the prompt the engine had cached by what it
// reports in a kind of answer, -1 if that is unknown. SGLang omits the count if it is
// 0, and in kinds of answers that have none: if another answer of the kind had one, it
// is 0.
func (w *Worker) CachedTokens(kind ReportKind, reported int64) int64 {
	if w.Engine.Last().Type != engine.SGLang {
		return reported
	}
	if !w.cacheCheck.reported(kind, reported >= 0) {
		return -1
	}
	return max(reported, 0)
}
