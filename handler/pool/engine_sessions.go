package pool

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

const (
	// closeTimeout is how long an engine may take to close a session.
	closeTimeout = 5 * time.Second
	// closeTries is how often the router asks an engine to close a session. The engine's own
	// timeout closes it in the end.
	closeTries = 5
	// maxClosing bounds the sessions that wait to be closed on one worker.
	maxClosing = 1 << 14
	// maxLost is how many lost sessions the pool remembers at least, and half of how many it
	// remembers at most.
	maxLost = 1 << 15
	// lastCloses is how long the pool waits for engines to close sessions when it ends.
	lastCloses = 5 * time.Second
)

// Caller makes the router's own requests to a worker, for one configuration.
type Caller func(ctx context.Context, dial, path string, body []byte) (status int, answer []byte, err error)

// engineSessions closes the sessions that engines hold for the router. The code that ends a
// session's engine-backed binding closes the session. A binding ends once, so each session is
// closed once.
type engineSessions struct {
	mu      sync.Mutex
	closing map[*Worker]*closings
	queued  sync.WaitGroup // workers with sessions to close

	newLost, oldLost map[affinity.Key]struct{} // old is dropped when new is full
}

// closings are the sessions to be closed on one worker. One goroutine closes them in turn,
// until none is left.
type closings struct {
	ids  []string      // in order; the first may be under way
	busy chan struct{} // closed when the call that is under way has ended; nil if there is none
}

// CloseSession has the worker's engine close a session in the background.
func (p *Pool) CloseSession(b affinity.Binding) {
	w := p.ByID(b.Target.Worker)
	if w == nil {
		p.countSession("close", "gone")
		return
	}
	s := &p.engineSessions
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.closing[w]
	if c == nil {
		if s.closing == nil {
			s.closing = make(map[*Worker]*closings)
		}
		c = new(closings)
		s.closing[w] = c
		s.queued.Add(1)
		go p.closeSessions(w, c)
	}
	if len(c.ids) >= maxClosing {
		p.countSession("close", "dropped")
		return
	}
	c.ids = append(c.ids, b.EngineSession)
}

// closeSessions closes the sessions that wait on a worker.
func (p *Pool) closeSessions(w *Worker, c *closings) {
	s := &p.engineSessions
	defer s.queued.Done()
	for {
		s.mu.Lock()
		if len(c.ids) == 0 {
			delete(s.closing, w)
			s.mu.Unlock()
			return
		}
		id := c.ids[0]
		c.ids, c.busy = c.ids[1:], make(chan struct{})
		s.mu.Unlock()

		p.countSession("close", p.closeSession(w, id))

		s.mu.Lock()
		close(c.busy)
		c.busy = nil
		s.mu.Unlock()
	}
}

// closeSession asks an engine to close a session, up to closeTries times. It returns what
// became of it, as the metric says.
func (p *Pool) closeSession(w *Worker, id string) (outcome string) {
	life := w.Engine.Info().Life
	for try := range closeTries {
		if try > 0 && !p.sleep(time.Second<<(try-1)) {
			break
		}
		if now := w.Engine.Info().Life; now != life && life != "" {
			return "gone" // the engine has restarted
		}
		e := p.EngineOf(w)
		status, err := p.call(w, e.CloseSession(id))
		if err == nil && e.Closed(status) {
			return "closed"
		}
	}
	p.Incidents.Raise(time.Now(), "engines fail to close sessions, and close them only by their own timeout", p.Logger)
	return "failed"
}

// sleep waits. It returns false if the pool ends first.
func (p *Pool) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.stop:
		return false
	}
}

var errNoCaller = errors.New("no configuration has asked the worker yet")

func (p *Pool) call(w *Worker, call engine.SessionCall) (status int, err error) {
	caller := w.Caller.Load()
	if caller == nil {
		return 0, errNoCaller
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	status, _, err = (*caller)(ctx, w.Dial, call.Path, call.Body)
	return status, err
}

// Reopen withdraws what would close a session on a worker, because a client opens it again. It
// waits for a call that is under way.
func (p *Pool) Reopen(ctx context.Context, w *Worker, id string) error {
	s := &p.engineSessions
	s.mu.Lock()
	var busy chan struct{}
	if c := s.closing[w]; c != nil {
		busy = c.busy
		kept := c.ids[:0]
		for _, other := range c.ids {
			if other != id {
				kept = append(kept, other)
			}
		}
		c.ids = kept
	}
	s.mu.Unlock()
	if busy == nil {
		return nil
	}
	select {
	case <-busy:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// EndSession ends a binding, if it has the version. The engine closes the session if it holds
// it. lost: a turn to come must be told that the session is lost.
func (p *Pool) EndSession(ctx context.Context, key affinity.Key, v affinity.Version, lost bool) (b affinity.Binding, ended bool, err error) {
	b, ended, err = p.Sessions.Unbind(ctx, key, v)
	if ended && b.Kind == affinity.EngineBacked {
		if lost {
			p.lose(key)
		}
		p.CloseSession(b)
	}
	return b, ended, err
}

// bindingEnded is the store's report of the end of an engine-backed binding.
func (p *Pool) bindingEnded(key affinity.Key, b affinity.Binding, _ affinity.Reason) {
	now, ok, err := p.Sessions.Peek(context.Background(), key)
	if err == nil && ok && now.Kind == affinity.EngineBacked && now.Target == b.Target && now.EngineSession == b.EngineSession {
		return // the client has opened it again, on the same worker
	}
	if !ok {
		p.lose(key)
	}
	p.CloseSession(b)
}

// loseSessions ends the bindings of the sessions that a worker's engine held before it
// restarted. There is nothing to close.
func (p *Pool) loseSessions(w *Worker) {
	for _, key := range p.Sessions.store.EngineBacked() {
		b, ok, err := p.Sessions.Peek(context.Background(), key)
		if err != nil || !ok || b.Kind != affinity.EngineBacked || b.Target.Worker != w.ID {
			continue
		}
		if _, ended, _ := p.Sessions.Unbind(context.Background(), key, b.Version); ended {
			p.lose(key)
			p.countSession("close", "gone")
		}
	}
}

// closeAll closes the sessions that engines hold, for the pool ends.
func (p *Pool) closeAll() {
	for _, key := range p.Sessions.store.EngineBacked() {
		if b, ok, err := p.Sessions.Peek(context.Background(), key); ok && err == nil {
			_, _, _ = p.EndSession(context.Background(), key, b.Version, false)
		}
	}
	done := make(chan struct{})
	go func() {
		p.engineSessions.queued.Wait()
		close(done)
	}()
	timer := time.NewTimer(lastCloses)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		p.Logger().Warn("engines did not close their sessions in time; their own timeout closes them")
	}
}

// lose remembers that the session of a key is lost.
func (p *Pool) lose(key affinity.Key) {
	s := &p.engineSessions
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.newLost == nil || len(s.newLost) >= maxLost {
		s.newLost, s.oldLost = make(map[affinity.Key]struct{}), s.newLost
	}
	s.newLost[key] = struct{}{}
}

// Lost returns whether an engine held the session of a key, which is lost.
func (p *Pool) Lost(key affinity.Key) bool {
	s := &p.engineSessions
	s.mu.Lock()
	defer s.mu.Unlock()
	_, isNew := s.newLost[key]
	_, isOld := s.oldLost[key]
	return isNew || isOld
}

// Found forgets that the session of a key was lost, because a client has opened it again.
func (p *Pool) Found(key affinity.Key) {
	s := &p.engineSessions
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.newLost, key)
	delete(s.oldLost, key)
}
