package pool

import (
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
)

const (
	// maxOthers bounds the workers of a pool from placeholders and dynamic sources.
	maxOthers = 1024
	// othersKept is the least time for which the pool remembers one of these.
	othersKept = 10 * time.Second
	// maxDial is the longest address of one of these, in bytes.
	maxDial = 512
	// dialOthers is the address of the worker that stands for all above maxOthers.
	dialOthers = "(others)"
	// currentFor is how long one of these counts as an upstream after a request saw it.
	currentFor = time.Minute
)

// Worker returns the worker behind an address. It makes a new one known to the pool.
func (p *Pool) Worker(dial string) *Worker {
	if w := p.Known(dial); w != nil {
		return w
	}
	if !speakable(dial) {
		return p.unnamed // the proxy returns the error
	}
	w := p.other(dial)
	if w == p.unnamed {
		p.Incidents.Raise(time.Now(), "more worker addresses than the router tracks", p.Logger)
	}
	return w
}

// other returns the worker behind an address that was unknown, or unnamed if there is no
// room for one more.
func (p *Pool) other(dial string) *Worker {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if p.Workers[dial] == nil && !p.Settings.Load().isNamed(dial) && !p.hasRoom(time.Now()) {
		return p.unnamed
	}
	return p.declare(dial)
}

// Known returns the worker behind an address, nil if it is not known.
func (p *Pool) Known(dial string) *Worker {
	p.Mu.RLock()
	defer p.Mu.RUnlock()
	return p.Workers[dial]
}

// peek returns the worker behind an address without making it known to the pool.
func (p *Pool) peek(dial string) *Worker {
	if w := p.Known(dial); w != nil {
		return w
	}
	return p.newWorker(p.Settings.Load().Worker(dial))
}

// All returns the workers, in no order.
func (p *Pool) All() []*Worker {
	p.Mu.RLock()
	defer p.Mu.RUnlock()
	list := make([]*Worker, 0, len(p.Workers))
	for _, w := range p.Workers {
		list = append(list, w)
	}
	return list
}

// ByID returns the worker with an id, nil if the pool knows none.
func (p *Pool) ByID(id uint64) *Worker {
	p.Mu.RLock()
	defer p.Mu.RUnlock()
	for _, w := range p.Workers {
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
			p.countFromZero(p.declare(dial))
		}
	}
}

// declare makes the worker behind an address known. The caller holds the lock.
func (p *Pool) declare(dial string) *Worker {
	if w := p.Workers[dial]; w != nil {
		return w
	}
	set := p.Settings.Load().Worker(dial)
	w := p.newWorker(set)
	p.Workers[dial] = w
	p.declareRanks(w, set)
	p.Layout.Add(1)
	return w
}

// renumber replaces the workers whose id changes. An id may move to another address, so
// the pool clears all old targets before it declares a new one. The caller holds the lock.
func (p *Pool) renumber(s *Settings) {
	var old []*Worker
	for dial, w := range p.Workers {
		if s.Worker(dial).ID == w.ID {
			continue
		}
		old = append(old, w)
		delete(p.Workers, dial)
		w.watch.Close()
		p.loseSessions(w, true) // a turn must not go to another worker that gets the id
		p.retireRanks(w, 0, w.Ranks())
		for rank := range w.Ranks() { // a retired target stays while it has leases
			p.Scheduler.Clear(w.Target(rank))
		}
	}
	for _, w := range old {
		fresh := p.declare(w.Dial)
		fresh.Slots = w.Slots                             // the address still runs its requests
		fresh.describe(s.Worker(w.Dial), w.Engine().Info) // and its engine
		if w.Drain.Load()&DrainAsked != 0 {
			fresh.Drain.Or(DrainAsked) // the operator drained the address
		}
	}
}

// nameless makes the worker that stands for all upstreams above maxOthers. It has no
// cache model.
func (p *Pool) nameless() *Worker {
	set := p.Settings.Load().Worker(dialOthers)
	set.DPSize, set.MaxRunning = 1, 0
	w := p.newWorker(set)
	p.Scheduler.Retire(w.Target(0))
	return w
}

// speakable returns whether an address can be that of a worker. A placeholder may yield
// any text, and addresses become labels of metrics.
func speakable(dial string) bool {
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
// not name. If there are too many, it drops those that were not seen for longest. The
// caller holds the lock.
func (p *Pool) hasRoom(t time.Time) bool {
	s := p.Settings.Load()
	most := maxOthers
	for dial := range s.Upstreams {
		if s.isNamed(dial) { // placeholders are not
			most++
		}
	}
	if len(p.Workers) < most {
		return true
	}
	if t.Sub(p.swept) < time.Second {
		return false
	}
	p.swept = t
	var idle []*Worker
	for dial, w := range p.Workers {
		if !s.isNamed(dial) && t.Unix()-w.Seen.Load() > int64(othersKept/time.Second) && !w.Draining() {
			idle = append(idle, w)
		}
	}
	slices.SortFunc(idle, func(a, b *Worker) int { return int(a.Seen.Load() - b.Seen.Load()) })
	for _, w := range idle[:min(len(idle), maxOthers/4)] {
		p.Drop(w)
	}
	return len(p.Workers) < most
}

// Drop forgets a worker and its metrics, unless it has leases. It also retires the targets,
// because a request with an older table may still book on one. The caller holds the lock.
func (p *Pool) Drop(w *Worker) bool {
	defer p.Layout.Add(1)
	all := true
	for rank := range w.Ranks() {
		all = p.Scheduler.Forget(w.Target(rank)) && all
	}
	if !all {
		p.declareRanks(w, p.Settings.Load().Worker(w.Dial)) // its requests still need it
		return false
	}
	p.retireRanks(w, 0, w.Ranks())
	delete(p.Workers, w.Dial)
	w.watch.Close()
	p.forgetCounts(w)
	return true
}

// IsUpstream returns whether the configuration has a worker as an upstream, or a
// placeholder or a dynamic source had it lately.
func (p *Pool) IsUpstream(s *Settings, w *Worker) bool {
	return s.Upstreams[w.Dial] || s.Others && p.LastRequest.Load()-w.Seen.Load() <= int64(currentFor/time.Second)
}

// IsNowUpstream returns whether the worker with an id is an upstream of any configuration.
func (p *Pool) IsNowUpstream(id uint64) bool {
	w := p.ByID(id)
	return w != nil && p.IsUpstream(p.Settings.Load(), w)
}

// forget drops workers that have not been upstreams for WorkerGrace. Only requests see
// dynamic upstreams, so their time stands still while there are none.
func (p *Pool) forget(t time.Time) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.Scheduler.Retire(p.unnamed.Target(0)) // again, because the scheduler may have forgotten it
	s := p.Settings.Load()
	last := t.Unix()
	if s.Others {
		last = p.LastRequest.Load()
	}
	for dial, w := range p.Workers {
		if !s.Upstreams[dial] && last-w.Seen.Load() > int64(WorkerGrace/time.Second) {
			p.Drop(w)
		}
	}
}
