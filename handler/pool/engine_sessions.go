package pool

import (
	"context"
	"net/http"
	"slices"
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
	// lastCloses is how long the pool waits for engines to close sessions when it ends.
	lastCloses = 5 * time.Second
)

// engineSessions closes the sessions that engines hold for the router. The code that ends an engine-backed binding calls CloseSession, or abandons the session.
// A failed opening and a restore call CloseSession without a binding.
type engineSessions struct {
	mu      sync.Mutex
	closing map[*Worker]*closings
	idle    chan struct{} // closed when there is nothing to close; nil if nobody waits
}

// closings are the sessions to be closed on one worker, in order. One goroutine closes them,
// until none is left. The first may be under way.
type closings struct{ queue []closing }

type closing struct {
	id   string
	over chan struct{} // closed when the session is closed, or the router has given up
}

// CloseSession has the engine of the target close a session in the background. Only Target and
// EngineSession count.
func (p *Pool) CloseSession(held affinity.Want) {
	w := p.ByID(held.Target.Worker)
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
		go p.closeSessions(w, c)
	}
	if len(c.queue) >= maxClosing {
		p.countSession("close", "dropped")
		return
	}
	c.queue = append(c.queue, closing{held.EngineSession, make(chan struct{})})
}

// closeSessions closes the sessions that wait on a worker.
func (p *Pool) closeSessions(w *Worker, c *closings) {
	s := &p.engineSessions
	for left := 1; left > 0; {
		s.mu.Lock()
		id := c.queue[0].id
		s.mu.Unlock()
		outcome := p.closeSession(w, id)
		p.countSession("close", outcome)
		s.mu.Lock()
		over := 1
		if outcome == "failed" && p.hasEnded() {
			over = len(c.queue) // nobody waits for an engine that does not answer
		}
		for range over - 1 {
			p.countSession("close", outcome)
		}
		for _, one := range c.queue[:over] {
			close(one.over)
		}
		c.queue = c.queue[over:]
		if left = len(c.queue); left == 0 {
			s.leave(w)
		}
		s.mu.Unlock()
	}
}

// leave records that nothing is left to be closed on a worker. The caller holds the lock.
func (s *engineSessions) leave(w *Worker) {
	delete(s.closing, w)
	if len(s.closing) == 0 && s.idle != nil {
		close(s.idle)
		s.idle = nil
	}
}

// closeSession asks an engine to close a session, up to closeTries times. It returns what
// became of it, as the metric says.
func (p *Pool) closeSession(w *Worker, id string) (outcome string) {
	life, refused := w.Engine().Info.Life, false
	for try := range closeTries {
		if try > 0 && !p.sleep(time.Second<<(try-1)) {
			break
		}
		e := w.Engine()
		call := e.CloseSession(id)
		if now := w.Engine().Info.Life; now != life && life != "" || call.Path == "" {
			return "gone" // the engine has restarted, or is another one
		}
		status, err := p.call(w, call)
		if err == nil && e.Closed(status) {
			return "closed"
		}
		refused = err != nil && Refused(err)
		if err == nil && (status == http.StatusUnauthorized || status == http.StatusForbidden) {
			break // it wants a key that the router does not have
		}
	}
	if refused {
		return "gone" // its process has ended
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

// hasEnded returns whether Destruct has ended the pool's upkeep.
func (p *Pool) hasEnded() bool {
	select {
	case <-p.stop:
		return true
	default:
		return false
	}
}

func (p *Pool) call(w *Worker, call engine.SessionCall) (status int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	status, _, err = p.Call(ctx, w, call.Path, call.Body)
	return status, err
}

// AwaitClosed waits until no session of an id is left to be closed on a worker. A client that
// opens it again must not get the context of the earlier one. The error is the context's.
func (p *Pool) AwaitClosed(ctx context.Context, w *Worker, id string) error {
	p.Sessions.Reported(ctx)
	for {
		over := p.engineSessions.hasten(w, id)
		if over == nil {
			return ctx.Err()
		}
		select {
		case <-over:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// hasten moves a session to the head of those that wait to be closed. It returns a channel
// that is closed when the session is over; nil if it does not wait.
func (s *engineSessions) hasten(w *Worker, id string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.closing[w]
	if c == nil {
		return nil
	}
	i := slices.IndexFunc(c.queue, func(one closing) bool { return one.id == id })
	if i < 0 {
		return nil
	}
	found := c.queue[i]
	if i > 1 {
		copy(c.queue[2:i+1], c.queue[1:i])
		c.queue[1] = found
	}
	return found.over
}

// EndSession ends a binding, if it has the version. The engine closes the session if it holds
// it. lost: a turn to come must be told that the session is lost.
func (p *Pool) EndSession(ctx context.Context, key affinity.Key, v affinity.Version, lost bool) (b affinity.Binding, ended bool, err error) {
	b, ended, err = p.Sessions.Unbind(ctx, key, v)
	if ended && b.Kind == affinity.EngineBacked {
		if lost {
			p.lose(key)
		}
		p.CloseSession(b.Want)
	}
	return b, ended, err
}

// bindingEnded has the engine close a session whose binding the store has ended.
func (p *Pool) bindingEnded(key affinity.Key, held affinity.Want) {
	now, ok, err := p.Sessions.Peek(context.Background(), key)
	if err == nil && ok && now.Kind == affinity.EngineBacked && now.Target == held.Target && now.EngineSession == held.EngineSession {
		return // the client has opened it again, on the same worker
	}
	if !ok {
		p.lose(key)
	}
	p.CloseSession(held)
}

// eachHeld passes the present engine-backed bindings to f.
func (p *Pool) eachHeld(f func(key affinity.Key, b affinity.Binding)) {
	p.Sessions.Dump(func(part []affinity.Saved) bool {
		for _, one := range part {
			if one.Kind != affinity.EngineBacked {
				continue
			}
			b, ok, err := p.Sessions.Peek(context.Background(), one.Key)
			if err == nil && ok && b.Kind == affinity.EngineBacked {
				f(one.Key, b)
			}
		}
		return true
	})
}

// loseSessions ends the bindings of the sessions that a worker's engine held. Their next turns
// are told. abandon: nobody closes them, because the process has ended or the worker's id
// changes. A caller that holds p.Mu must abandon. Otherwise the engine is asked to close them,
// for its process may live.
func (p *Pool) loseSessions(w *Worker, abandon bool) {
	p.eachHeld(func(key affinity.Key, b affinity.Binding) {
		switch {
		case b.Target.Worker != w.ID:
		case !abandon:
			_, _, _ = p.EndSession(context.Background(), key, b.Version, true)
		default:
			if _, ended, _ := p.Sessions.Unbind(context.Background(), key, b.Version); ended {
				p.lose(key)
				p.countSession("close", "gone")
			}
		}
	})
}

// HoldsForOther returns whether a worker's engine holds a session of an id for another key. That
// is the same client's session with another model.
func (p *Pool) HoldsForOther(key affinity.Key, w *Worker, id string) bool {
	return !p.Sessions.Dump(func(part []affinity.Saved) bool {
		return !slices.ContainsFunc(part, func(one affinity.Saved) bool {
			return one.EngineSession == id && one.Target.Worker == w.ID && one.Key != key
		})
	})
}

// closeAll closes the sessions that engines hold, for the pool ends.
func (p *Pool) closeAll() {
	p.Sessions.Reported(context.Background())
	p.eachHeld(func(key affinity.Key, b affinity.Binding) {
		_, _, _ = p.EndSession(context.Background(), key, b.Version, false)
	})
	s, idle := &p.engineSessions, make(chan struct{})
	s.mu.Lock()
	if len(s.closing) == 0 {
		close(idle)
	} else {
		s.idle = idle
	}
	s.mu.Unlock()
	timer := time.NewTimer(lastCloses)
	defer timer.Stop()
	select {
	case <-idle:
	case <-timer.C:
		p.Logger().Warn("engines did not close their sessions in time; their own timeout closes them")
	}
}
