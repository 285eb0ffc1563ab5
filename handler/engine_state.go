package handler

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"go.uber.org/zap"
)

const (
	// probeEvery is how often a worker is probed: asked for its models, or at least
	// connected to.
	probeEvery = 4 * time.Second
	// askedAgain is the time between two questions to a worker about its engine, which
	// may have restarted or been replaced.
	askedAgain = 15 * time.Second
	// askedLess is the longest time between two questions to a worker that does not
	// answer them.
	askedLess = 5 * time.Minute
	// idleAfter is how long a pool must have no request to be idle. Its workers may
	// sleep, or cost money for each question: they are asked as rarely as those that
	// do not answer. They are connected to all the same.
	idleAfter = 10 * time.Minute
	// sharedWithin is the time in which two changes of an engine's start mean that
	// several engines share the address.
	sharedWithin = time.Minute

	incidentShared = "several engines answer at one address"
)

// engineState is what the engine behind a worker's address tells of itself.
type engineState struct {
	told atomic.Pointer[engine.Info] // nil: nothing so far

	mu      sync.Mutex
	next    time.Time         // when the engine is asked again
	silent  int               // questions in a row that it did not answer
	start   string            // what it told last of its start
	changed time.Time         // when that changed last
	warned  map[string]string // contradictions that the log has
}

// last returns what the engine told last, the zero Info if it told nothing.
func (e *engineState) last() engine.Info {
	if t := e.told.Load(); t != nil {
		return *t
	}
	return engine.Info{}
}

// askAgain has the next probe of the worker ask the engine.
func (e *engineState) askAgain() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.next = time.Time{}
}

// claim returns whether the engine is to be asked now. The caller then asks it, and
// nobody else does meanwhile.
func (e *engineState) claim(t time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t.Before(e.next) {
		return false
	}
	e.next = t.Add(probeEvery)
	return true
}

// isSilent returns whether the engine left the last two questions unanswered.
func (e *engineState) isSilent() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.silent > 1
}

// answered records whether the engine answered a question. One that does not is asked
// less and less often.
func (e *engineState) answered(t time.Time, told bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if told {
		e.silent, e.next = 0, t.Add(askedAgain)
		return
	}
	e.next = t.Add(min(probeEvery<<min(e.silent, 8), askedLess))
	e.silent++
}

// restarted records what the engine says of its start. It returns whether that has
// changed, and whether it has changed twice within a minute: then several engines
// share the address.
func (e *engineState) restarted(t time.Time, start string) (changed, shared bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if start == "" || start == e.start {
		return false, false
	}
	changed = e.start != ""
	e.start = start
	if changed {
		shared = t.Sub(e.changed) < sharedWithin
		e.changed = t
	}
	return changed, shared
}

// engineOf returns what is known of a worker's engine.
func (p *pool) engineOf(w *worker) engine.Engine {
	set := p.settings.Load().worker(w.dial)
	return set.describe(w.engine.last())
}

// describe returns what is known of an engine: its type is the configured one, or
// else the one that it shows.
func (w *workerSettings) describe(info engine.Info) engine.Engine {
	e := engine.Engine{Type: info.Type, Info: info, Settings: w.engineSettings()}
	if w.Engine != engineAuto {
		e.Type = w.Engine
	}
	return e
}

// learn records what a worker's engine tells of itself. An answer without a type, or
// with an unsure one, changes nothing once the type is known.
func (p *pool) learn(w *worker, told engine.Info) {
	t, before := time.Now(), w.engine.last()
	w.engine.answered(t, told.Type != "" && told.Type != engine.Other)
	if (told.Type == "" || told.Unsure) && before.Type != "" {
		return
	}
	told.Unsure = false
	told = told.Or(before)
	if !p.setInfo(w, &told) {
		return
	}
	if logged(told) != logged(before) {
		p.logger().Info("worker tells what it is", zap.String("upstream", w.dial), zap.Object("engine", infoFields(told)))
	}
	switch changed, shared := w.engine.restarted(t, told.Life); {
	case shared:
		p.incidents.met(t, incidentShared, p.logger)
	case changed, before.Type != "" && told.Type != before.Type:
		p.clear(w, clearedRestarted)
	}
	p.contradict(w)
}

// setInfo stores an engine's info. It returns false if the pool has replaced the worker
// meanwhile.
func (p *pool) setInfo(w *worker, told *engine.Info) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.workers[w.dial] != w {
		return false
	}
	w.engine.told.Store(told)
	p.declareRanks(w, p.settings.Load().worker(w.dial))
	return true
}

// markProbed records the end of a probe.
func (w *worker) markProbed() { w.probedOnce.Do(func() { close(w.probed) }) }

// wasProbed returns whether a probe of the worker has ended.
func (w *worker) wasProbed() bool {
	select {
	case <-w.probed:
		return true
	default:
		return false
	}
}

// restOf returns the least time between two questions to a worker about its models.
func (p *pool) restOf(w *worker) time.Duration {
	if p.isIdle(time.Now()) {
		return askedLess
	}
	if n := w.refusals.Load(); n > 0 {
		return min(probeEvery<<min(n, 8), askedLess)
	}
	return 0
}

// isIdle returns whether the pool has had no request for idleAfter.
func (p *pool) isIdle(t time.Time) bool {
	return t.Unix()-max(p.used.Load(), p.live.Load()) > int64(idleAfter/time.Second)
}
