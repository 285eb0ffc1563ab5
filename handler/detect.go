package handler

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"go.uber.org/zap"
)

const (
	// detectTimeout is how long a worker may take to tell what it is, beside its
	// models: some five short answers.
	detectTimeout = 3 * time.Second
	// askedAgain is after how long a worker is asked again that has told: it may
	// be another one by then, or have restarted.
	askedAgain = 15 * time.Second
	// askedLess is the longest that a worker which tells nothing is left alone.
	askedLess = 5 * time.Minute
	// sharedWithin is the time in which two changes of an engine's start mean that
	// several engines share the address.
	sharedWithin = time.Minute

	incidentShared = "several engines answer at one address"
)

// engineState is what is known of the engine behind a worker's address, as it
// tells itself.
type engineState struct {
	told atomic.Pointer[engine.Info] // nil: nothing so far

	mu      sync.Mutex
	next    time.Time         // when it is asked again
	silent  int               // times in a row that it told nothing
	start   string            // what it told last of its start
	changed time.Time         // when that changed last
	warned  map[string]string // contradictions that the log has
}

// last returns what the engine told last, nothing if it told nothing.
func (e *engineState) last() engine.Info {
	if t := e.told.Load(); t != nil {
		return *t
	}
	return engine.Info{}
}

// askAgain lets the engine be asked with the next look at its worker.
func (e *engineState) askAgain() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.next = time.Time{}
}

// claim tells whether the engine is to be asked now. The caller then asks it, and
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

// isSilent tells whether the engine did not show again what it was before.
func (e *engineState) isSilent() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.silent > 1
}

// answered takes in that the engine was asked, and whether it told what it is:
// one that does not is asked less and less often.
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

// detect finds out what a worker is and what it tells of itself, if it is time
// to. It returns whether it was.
func (p *prober) detect(ctx context.Context, w *worker) bool {
	set := p.pool.settings.Load().worker(w.dial)
	if set.Engine == engine.Other || !w.engine.claim(now()) {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, detectTimeout)
	defer cancel()
	get := func(path string) (int, []byte) {
		if path == pathModels && w.refusals.Load() > 0 {
			return http.StatusUnauthorized, nil // it was just asked
		}
		return p.getBody(ctx, w, path)
	}
	kind := p.pool.engineOf(w).Type
	if kind == "" || kind == engine.Other || set.Engine == engineAuto && w.engine.isSilent() {
		p.pool.learn(w, engine.Ask(get))
	} else {
		p.pool.learn(w, engine.AskAs(kind, get))
	}
	return true
}

// getBody returns the status and the body of an answer of a worker, status 0 if
// there is none.
func (p *prober) getBody(ctx context.Context, w *worker, path string) (int, []byte) {
	status, body, err := p.client.Fetch(ctx, w.dial, http.MethodGet, path, nil, nil, engine.MaxBody)
	if !p.pool.saw(ctx, w, status, err) || err != nil && !errors.Is(err, upstream.ErrTooLong) {
		return 0, nil
	}
	return status, body
}

// learn takes in what a worker tells of itself.
func (p *pool) learn(w *worker, told engine.Info) {
	before := w.engine.last()
	w.engine.answered(now(), told.Type != "" && told.Type != engine.Other)
	if (told.Type == "" || told.Unsure) && before.Type != "" {
		return // for now it is taken to be what it was
	}
	told.Unsure = false
	told = told.Or(before)
	if !p.takeIn(w, told) {
		return // a new configuration made another one of it
	}
	if logged(told) != logged(before) {
		p.logger().Info("worker tells what it is", zap.String("upstream", w.dial), zap.Object("engine", infoFields(told)))
	}
	switch changed, shared := w.engine.restarted(now(), told.Life); {
	case shared:
		p.incidents.met(now(), incidentShared, p.logger)
	case changed, before.Type != "" && told.Type != before.Type:
		p.clear(w, clearedRestarted)
	}
	p.contradict(w)
}

// takeIn makes what a worker tells what is known of it, and tells whether the
// worker is still one of the pool's.
func (p *pool) takeIn(w *worker, told engine.Info) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.workers[w.dial] != w {
		return false
	}
	w.engine.told.Store(&told)
	p.declareRanks(w, p.settings.Load().worker(w.dial))
	return true
}
