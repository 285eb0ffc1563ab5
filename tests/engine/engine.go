package engine

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// EngineHeader is the response header in which an engine says its name.
const EngineHeader = canned.EngineHeader

// Engine is one simulated engine. Its address and its journal stay the same over
// Kill and Restart.
type Engine struct {
	cfg     Config
	clock   clock
	journal *journal
	faults  faults
	ids     atomic.Uint64 // of requests

	transfers transferCounts

	// ops is held through Kill, Restart, Close and SetFault, so that they come one
	// after another. No request ever waits for it.
	ops        sync.Mutex
	lives      int
	closed     bool
	server     canned.Server
	sockets    []string // of the publishers: those to subscribe at, by rank, and those for replays
	sideServer canned.Server

	mu   sync.Mutex
	life *life // nil while killed
}

// keepAlive is for how long an idle connection is kept, as vLLM's server does.
const keepAlive = 5 * time.Second

// Start starts an engine. Close must be called when it is not needed any more.
func Start(cfg Config) (*Engine, error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("configuring engine: %w", err)
	}
	e := &Engine{cfg: cfg, clock: clock{time.Now(), cfg.Speed}, journal: new(journal)}
	e.server.Handler, e.server.IdleTimeout = e, keepAlive
	if err := e.boot(func() error { return e.server.Start(cfg.Addr) }); err != nil {
		return nil, fmt.Errorf("starting engine: %w", err)
	}
	return e, nil
}

// Name returns the engine's name.
func (e *Engine) Name() string { return e.cfg.Name }

// Addr returns the engine's host:port.
func (e *Engine) Addr() string { return e.server.Addr() }

// URL returns the engine's base URL, without a slash at the end.
func (e *Engine) URL() string { return "http://" + e.Addr() }

// boot begins a new life, with empty caches, and lets requests in. The caller holds ops, or nothing
// else has the engine.
func (e *Engine) boot(serve func() error) error {
	pubs, err := e.publish()
	var channel *side
	if err == nil {
		channel, err = e.openSide()
	}
	if err != nil {
		for _, p := range pubs {
			p.Close()
		}
		return err
	}
	l := newLife(e.cfg, e.clock, pubs)
	l.side = channel
	e.lives++
	l.number = e.lives
	e.faults.clear()
	e.mu.Lock()
	e.life = l
	e.mu.Unlock()
	if err = serve(); err != nil {
		e.kill()
	}
	return err
}

// Kill ends the engine as the end of its process would: the listener and all
// connections are closed at once, and the cache is lost.
func (e *Engine) Kill() {
	e.ops.Lock()
	defer e.ops.Unlock()
	e.kill()
}

func (e *Engine) kill() {
	e.mu.Lock()
	l := e.life
	e.life = nil
	e.mu.Unlock()
	if l == nil {
		return
	}
	l.over.Store(true)
	e.server.Kill()
	l.side.close()
	for _, p := range l.publishers {
		p.Close()
	}
	l.end()
}

// Restart ends the engine if it runs, and starts it again at the same address,
// with empty caches, no fault, and a new process_start_time_seconds.
func (e *Engine) Restart() error {
	e.ops.Lock()
	defer e.ops.Unlock()
	if e.closed {
		return errors.New("engine is closed")
	}
	e.kill()
	return e.boot(e.server.Restart)
}

// Close ends the engine for good.
func (e *Engine) Close() {
	e.ops.Lock()
	defer e.ops.Unlock()
	e.kill()
	e.closed = true
}

// enter returns the present life for one request, which must leave it. It returns
// nil while the engine is dead.
func (e *Engine) enter() *life {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.life != nil {
		e.life.handlers.Add(1)
	}
	return e.life
}

// Journal returns what the engine received, the oldest first.
func (e *Engine) Journal() []Record { return e.journal.all() }
