package pool

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"go.uber.org/zap"
)

const (
	// ProbeEvery is how often a worker is probed: asked for its models, or at least
	// connected to.
	ProbeEvery = 4 * time.Second
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

// Last returns what the engine told last, the zero Info if it told nothing.
func (e *engineState) Last() engine.Info {
	if t := e.told.Load(); t != nil {
		return *t
	}
	return engine.Info{}
}

// AskAgain has the next probe of the worker ask the engine.
func (e *engineState) AskAgain() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.next = time.Time{}
}

// Claim returns whether the engine is to be asked now. The caller then asks it, and
// nobody else does meanwhile.
func (e *engineState) Claim(t time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t.Before(e.next) {
		return false
	}
	e.next = t.Add(ProbeEvery)
	return true
}

// IsSilent returns whether the engine left the last two questions unanswered.
func (e *engineState) IsSilent() bool {
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
	e.next = t.Add(min(ProbeEvery<<min(e.silent, 8), askedLess))
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

// EngineOf returns what is known of a worker's engine.
func (p *Pool) EngineOf(w *Worker) engine.Engine {
	set := p.Settings.Load().Worker(w.Dial)
	return set.describe(w.Engine.Last())
}

// describe returns what is known of an engine: its type is the configured one, or
// else the one that it shows.
func (w *WorkerSettings) describe(info engine.Info) engine.Engine {
	e := engine.Engine{Type: info.Type, Info: info, Settings: w.engineSettings()}
	if w.Engine != EngineAuto {
		e.Type = w.Engine
	}
	return e
}

// Learn records what a worker's engine tells of itself. An answer without a type, or
// with an unsure one, changes nothing once the type is known.
func (p *Pool) Learn(w *Worker, told engine.Info) {
	t, before := time.Now(), w.Engine.Last()
	w.Engine.answered(t, told.Type != "" && told.Type != engine.Other)
	if (told.Type == "" || told.Unsure) && before.Type != "" {
		return
	}
	told.Unsure = false
	told = told.Or(before)
	if !p.setInfo(w, &told) {
		return
	}
	if logged(told) != logged(before) {
		p.Logger().Info("worker tells what it is", zap.String("upstream", w.Dial), zap.Object("engine", infoFields(told)))
	}
	switch changed, shared := w.Engine.restarted(t, told.Life); {
	case shared:
		p.Incidents.Raise(t, incidentShared, p.Logger)
	case changed, before.Type != "" && told.Type != before.Type:
		p.clear(w, clearedRestarted)
	}
	p.contradict(w)
}

// setInfo stores an engine's info. It returns false if the pool has replaced the worker
// meanwhile.
func (p *Pool) setInfo(w *Worker, told *engine.Info) bool {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if p.Workers[w.Dial] != w {
		return false
	}
	w.Engine.told.Store(told)
	p.declareRanks(w, p.Settings.Load().Worker(w.Dial))
	return true
}

// MarkProbed records the end of a probe.
func (w *Worker) MarkProbed() { w.probedOnce.Do(func() { close(w.Probed) }) }

// WasProbed returns whether a probe of the worker has ended.
func (w *Worker) WasProbed() bool {
	select {
	case <-w.Probed:
		return true
	default:
		return false
	}
}

// RestOf returns the least time between two questions to a worker about its models.
func (p *Pool) RestOf(w *Worker) time.Duration {
	if p.isIdle(time.Now()) {
		return askedLess
	}
	if n := w.Refusals.Load(); n > 0 {
		return min(ProbeEvery<<min(n, 8), askedLess)
	}
	return 0
}

// isIdle returns whether the pool has had no request for idleAfter.
func (p *Pool) isIdle(t time.Time) bool {
	return t.Unix()-max(p.Used.Load(), p.Live.Load()) > int64(idleAfter/time.Second)
}
