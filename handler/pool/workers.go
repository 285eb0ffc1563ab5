package pool

import (
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2"
)

const (
	// maxOverflow bounds the workers of a pool from placeholders and dynamic sources.
	maxOverflow = 1024
	// overflowKept is the least time for which the pool remembers one of these.
	overflowKept = 10 * time.Second
	// maxDial is the longest address of one of these, in bytes.
	maxDial = 512
	// dialOverflow is the address of the worker that stands for all above maxOverflow.
	dialOverflow = "(others)"
	// currentFor is how long one of these counts as an upstream after a request saw it.
	currentFor = time.Minute
)

// Worker returns the worker behind an address. It makes a new one known to the pool.
func (p *Pool) Worker(dial string) *Worker {
	if w := p.Known(dial); w != nil {
		return w
	}
	if !validDial(dial) {
		return p.overflow // the proxy returns the error
	}
	w := p.other(dial)
	if w == p.overflow {
		p.Incidents.Raise(time.Now(), "more worker addresses than the router tracks", p.Logger)
	}
	return w
}

// other returns the worker behind an address that was unknown, or overflow if there is no
// room for one more.
func (p *Pool) other(dial string) *Worker {
	p.members.mu.Lock()
	defer p.members.mu.Unlock()
	if p.workers[dial] == nil && !p.Settings.Load().isNamed(dial) && !p.hasRoom(time.Now()) {
		return p.overflow
	}
	return p.declare(dial)
}

// Known returns the worker behind an address, nil if it is not known.
func (p *Pool) Known(dial string) *Worker {
	p.members.mu.RLock()
	defer p.members.mu.RUnlock()
	return p.workers[dial]
}

// peek returns the worker behind an address without making it known to the pool.
func (p *Pool) peek(dial string) *Worker {
	if w := p.Known(dial); w != nil {
		return w
	}
	return worker.New(p.Name, p.Settings.Load().Worker(dial))
}

// All returns the workers, in no order.
func (p *Pool) All() []*Worker {
	p.members.mu.RLock()
	defer p.members.mu.RUnlock()
	return slices.Collect(maps.Values(p.workers))
}

// ByID returns the worker with an id, nil if the pool knows none.
func (p *Pool) ByID(id uint64) *Worker {
	p.members.mu.RLock()
	defer p.members.mu.RUnlock()
	for _, w := range p.workers {
		if w.ID == id {
			return w
		}
	}
	return nil
}

// declareAll makes all named workers known. The caller holds the lock, or nothing uses
// the pool yet.
func (p *Pool) declareAll(s *Settings) {
	for dial := range s.Upstreams {
		if s.isNamed(dial) {
			p.declare(dial).Past.FromZero()
		}
	}
}

// declare makes the worker behind an address known. The caller holds the lock.
func (p *Pool) declare(dial string) *Worker {
	if w := p.workers[dial]; w != nil {
		return w
	}
	set := p.Settings.Load().Worker(dial)
	w := worker.New(p.Name, set)
	p.workers[dial] = w
	p.declareRanks(w, set)
	p.layout.Add(1)
	return w
}

// renumber replaces the workers whose id changes. An id may move to another address, so
// the pool clears all old targets before it declares a new one. The caller holds the lock.
func (p *Pool) renumber(s *Settings) {
	var old []*Worker
	for dial, w := range p.workers {
		if s.Worker(dial).ID == w.ID {
			continue
		}
		old = append(old, w)
		delete(p.workers, dial)
		p.Go(w.Close)
		w.Past.ForgetFigures()
		p.retireRanks(w, 0, w.Ranks())
		for rank := range w.Ranks() { // a retired target stays while it has leases
			p.Scheduler.Clear(w.Target(rank))
		}
	}
	for _, w := range old {
		fresh := p.declare(w.Dial)
		fresh.Succeed(w)
		fresh.Describe(s.Worker(w.Dial), w.Engine().Info)
	}
}

// newOverflow makes the worker that stands for all upstreams above maxOverflow. It has no
// cache model.
func (p *Pool) newOverflow() *Worker {
	set := p.Settings.Load().Worker(dialOverflow)
	set.DPSize, set.MaxRunning = 1, 0
	w := worker.New(p.Name, set)
	p.Scheduler.Retire(w.Target(0))
	return w
}

// validDial returns whether an address can be that of a worker. A placeholder may yield
// any text, and addresses become labels of metrics.
func validDial(dial string) bool {
	if dial == "" || len(dial) > maxDial || !utf8.ValidString(dial) {
		return false
	}
	addr, err := caddy.ParseNetworkAddress(dial)
	return err == nil && addr.PortRangeSize() == 1
}

// isNamed returns whether the configuration names an address, without placeholders.
func (s *Settings) isNamed(dial string) bool {
	return s.Upstreams[dial] && !strings.Contains(dial, "{")
}

// hasRoom returns whether the pool may know one more worker that the configuration does
// not name. If there are too many, it drops those that were not seen lately. The caller
// holds the lock.
func (p *Pool) hasRoom(t time.Time) bool {
	s := p.Settings.Load()
	most := maxOverflow + len(s.Upstreams)
	if len(p.workers) < most {
		return true
	}
	if t.Sub(p.swept) < time.Second {
		return false
	}
	p.swept = t
	p.dropIdle(s, t.Unix(), overflowKept)
	return len(p.workers) < most
}

// drop forgets a worker and its metrics, unless it has leases. It also retires the targets,
// because a request with an older table may still book on one. The caller holds the lock.
func (p *Pool) drop(w *Worker) {
	defer p.layout.Add(1)
	all := true
	for rank := range w.Ranks() {
		all = p.Scheduler.Forget(w.Target(rank)) && all
	}
	if !all {
		p.declareRanks(w, p.Settings.Load().Worker(w.Dial)) // its requests still need it
		return
	}
	p.retireRanks(w, 0, w.Ranks())
	delete(p.workers, w.Dial)
	p.Go(w.Close)
	w.Past.Forget()
}

// IsUpstream returns whether the configuration has a worker as an upstream, or a
// placeholder or a dynamic source had it lately.
func (p *Pool) IsUpstream(s *Settings, w *Worker) bool {
	return s.Upstreams[w.Dial] || s.Others && p.WasOffered(w, currentFor)
}

// IsNowUpstream returns whether the worker with an id is an upstream of any configuration.
func (p *Pool) IsNowUpstream(id uint64) bool {
	w := p.ByID(id)
	return w != nil && p.IsUpstream(p.Settings.Load(), w)
}

// forget drops workers that have not been upstreams for WorkerGrace. Only requests see
// dynamic upstreams, so their time stands still while there are none.
func (p *Pool) forget(t time.Time) {
	p.members.mu.Lock()
	defer p.members.mu.Unlock()
	s := p.Settings.Load()
	last := t.Unix()
	if s.Others {
		last = p.lastRequest.Load()
	}
	p.dropIdle(s, last, WorkerGrace)
}

// dropIdle drops the workers that the configuration does not name and that were not seen for a
// time. A drain is remembered for WorkerGrace. The caller holds the lock.
func (p *Pool) dropIdle(s *Settings, now int64, after time.Duration) {
	for dial, w := range p.workers {
		idle := time.Duration(now-w.Seen()) * time.Second
		if !s.isNamed(dial) && idle > after && (idle > WorkerGrace || !w.Draining()) {
			p.drop(w)
		}
	}
}
