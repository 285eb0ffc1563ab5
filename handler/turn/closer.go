package turn

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
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
	// maxEnders is how many ends of sessions the closer takes up with other routers at a time.
	maxEnders = 8
	// lostFor is how long the router remembers at least that an engine's session has expired.
	lostFor = 10 * time.Minute
)

// closer closes the sessions that engines hold for the router, one by one on each worker, in the
// background. It lives as long as its pool.
type closer struct {
	pool *pool.Pool

	mu      sync.Mutex
	closing map[*worker.Worker][]closing // the first may be under way; a goroutine closes each list

	ends   atomic.Int32  // of sessions that other routers may use: those that are not taken up yet
	enders chan struct{} // has one of each goroutine that takes up an end
}

type closing struct {
	id   string
	over chan struct{} // closed when the session is closed, or the router has given up
}

// NewCloser returns the closer of a pool. It is for [pool.New].
func NewCloser(p *pool.Pool) pool.Closer {
	return &closer{pool: p, closing: make(map[*worker.Worker][]closing), enders: make(chan struct{}, maxEnders)}
}

// Unbind ends a session's binding, if it has the version. The engine closes the session if it
// holds it.
func Unbind(p *pool.Pool, key affinity.Key, v affinity.Version) (affinity.Binding, bool) {
	b, ended := p.Sessions.Unbind(key, v)
	if ended && b.Kind == affinity.EngineBacked && endClaim(p, key) {
		p.Closer.Close(&b.Want)
	}
	return b, ended
}

// Ended implements [pool.Closer]. An expired session is bound as a lost one, at once. If another
// router still uses it, the next turn here finds its claim.
func (c *closer) Ended(key affinity.Key, held *affinity.Want, why affinity.Reason) {
	if held.EngineSession == "" {
		return
	}
	now, ok := c.pool.Sessions.Peek(key)
	if ok && now.Target == held.Target && now.EngineSession == held.EngineSession {
		return // the client has opened it again, on the same worker
	}
	if !ok && why == affinity.Expired {
		lost := *held
		lost.EngineSession, lost.TTL = "", max(held.TTL, lostFor)
		_, _, _ = c.pool.Sessions.Bind(key, 0, lost)
	}
	if _, shares := c.pool.Claims(); !shares || why == affinity.Replaced {
		c.Close(held)
		return
	}
	if c.ends.Add(1) > maxClosing {
		c.ends.Add(-1)
		observe.EngineSession(c.pool.Name, "close", "dropped")
		return
	}
	ended := *held
	go func() { // the server of share may be slow, and nobody waits for it
		c.enders <- struct{}{}
		c.ends.Add(-1)
		if l := endUnused(c.pool, key); l != nil {
			c.Close(&ended)
			l.endAfter(c.pool, &ended)
		}
		<-c.enders
	}()
}

// Close has the engine of the target close a session.
func (c *closer) Close(held *affinity.Want) {
	if held.EngineSession == "" {
		return
	}
	w := c.pool.ByID(held.Target.Worker)
	if w == nil {
		observe.EngineSession(c.pool.Name, "close", "gone")
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	list := c.closing[w]
	if len(list) >= maxClosing {
		observe.EngineSession(c.pool.Name, "close", "dropped")
		return
	}
	c.closing[w] = append(list, closing{held.EngineSession, make(chan struct{})})
	if len(list) == 0 {
		go c.run(w)
	}
}

// run closes the sessions that wait on a worker, until none is left.
func (c *closer) run(w *worker.Worker) {
	for left := 1; left > 0; {
		c.mu.Lock()
		id := c.closing[w][0].id
		c.mu.Unlock()
		outcome := c.ask(w, id)
		c.mu.Lock()
		list, over := c.closing[w], 1
		if outcome == "failed" && c.pool.Life().Err() != nil {
			over = len(list) // nobody waits for an engine that does not answer
		}
		for _, one := range list[:over] {
			observe.EngineSession(c.pool.Name, "close", outcome)
			close(one.over)
		}
		if left = len(list) - over; left == 0 {
			delete(c.closing, w)
		} else {
			c.closing[w] = list[over:]
		}
		c.mu.Unlock()
	}
}

// ask asks an engine to close a session, up to closeTries times. It returns what became of it, as
// the metric says.
func (c *closer) ask(w *worker.Worker, id string) (outcome string) {
	bootID, refused := w.Engine().Info.BootID, false
	for try := range closeTries {
		if try > 0 && !pool.Sleep(c.pool.Life(), time.Second<<(try-1)) {
			break
		}
		if now := w.Engine().Info.BootID; now != bootID && bootID != "" {
			return "gone" // the engine has restarted
		}
		call := engine.CloseSession(id)
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		status, _, err := c.pool.Members.Call(ctx, w, call.Path, call.Body)
		cancel()
		if err == nil && engine.Closed(status) {
			return "closed"
		}
		refused = err != nil && worker.Refused(err)
		if err == nil && (status == http.StatusUnauthorized || status == http.StatusForbidden) {
			break // it wants a key that the router does not have
		}
	}
	if refused {
		return "gone" // its process has ended
	}
	const incident = "engines fail to close sessions, and close them only by their own timeout"
	c.pool.Raise(time.Now(), incident)
	return "failed"
}

// Await waits until no session of an id is left to be closed on a worker. A client that opens it
// again must not get the context of the earlier one. The error is the context's.
func (c *closer) Await(ctx context.Context, w *worker.Worker, id string) error {
	c.pool.Sessions.Reported()
	for over := c.over(w, id); over != nil; over = c.over(w, id) {
		select {
		case <-over:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return ctx.Err()
}

// Closes implements [pool.Closer].
func (c *closer) Closes(w *worker.Worker, id string) bool { return c.over(w, id) != nil }

// over returns what is closed when the first session of an id is closed on a worker, nil if none
// waits for that.
func (c *closer) over(w *worker.Worker, id string) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range c.closing[w] {
		if one.id == id {
			return one.over
		}
	}
	return nil
}

// CloseAll implements [pool.Closer].
func (c *closer) CloseAll() {
	if _, shares := c.pool.Claims(); shares {
		return // the other routers go on with them
	}
	c.pool.Sessions.Reported()
	c.pool.Sessions.Dump(func(part []affinity.Saved) bool {
		for i := range part {
			c.Close(&part[i].Want)
		}
		return true
	})
	c.mu.Lock()
	var all []closing
	for _, list := range c.closing {
		all = append(all, list...)
	}
	c.mu.Unlock()
	late := time.After(lastCloses)
	for _, one := range all {
		select {
		case <-one.over:
		case <-late:
			c.pool.Logger().Warn("engines did not close their sessions in time; their own timeout closes them")
			return
		}
	}
}
