package pool

import (
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
)

const (
	// maxOthers bounds the workers of a pool that come from placeholders and dynamic
	// sources.
	maxOthers = 1024
	// othersKept is the least time for which one of these is remembered.
	othersKept = 10 * time.Second
	// maxDial is the longest address of one of these, in bytes.
	maxDial = 512
	// dialOthers is the address of the worker that stands for all above maxOthers.
	dialOthers = "(others)"
)

// Worker returns the worker behind an address, new ones included.
func (p *Pool) Worker(dial string) *Worker {
	if w := p.Known(dial); w != nil {
		return w
	}
	if !speakable(dial) {
		return p.unnamed // the proxy returns the error
	}
	w := p.other(dial)
	if w == p.unnamed {
		p.Incidents.Raise(time.Now(), "more workers than are told apart", p.Logger)
	}
	return w
}

// other returns the worker behind an address that was not known yet.
func (p *Pool) other(dial string) *Worker {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if p.Workers[dial] == nil && !p.Settings.Load().isNamed(dial) {
		if !p.hasRoom(time.Now()) {
			return p.unnamed
		}
		p.others++
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
	return newWorker(p.Settings.Load().Worker(dial))
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

// declareAll makes the static upstreams known whose addresses have no placeholders. The
// lock is held, or nothing uses the pool yet.
func (p *Pool) declareAll(s *Settings) {
	for dial := range s.Upstreams {
		if !strings.Contains(dial, "{") {
			p.countFromZero(p.declare(dial))
		}
	}
}

// declare makes the worker behind an address known. The lock is held.
func (p *Pool) declare(dial string) *Worker {
	if w := p.Workers[dial]; w != nil {
		return w
	}
	set := p.Settings.Load().Worker(dial)
	w := newWorker(set)
	p.Workers[dial] = w
	p.declareRanks(w, set)
	p.Layout.Add(1)
	return w
}

// renumber replaces the workers whose id changes. An id may move from one address to
// another: all old targets are retired and emptied before any new one is declared. The
// lock is held.
func (p *Pool) renumber(s *Settings) {
	var old []*Worker
	for dial, w := range p.Workers {
		if s.Worker(dial).ID == w.ID {
			continue
		}
		old = append(old, w)
		delete(p.Workers, dial)
		p.retireRanks(w, 0, w.Ranks())
		for rank := range w.Ranks() { // some may still have leases
			p.Scheduler.Clear(w.Target(rank))
		}
	}
	for _, w := range old {
		fresh := p.declare(w.Dial)
		fresh.Slots = w.Slots // the requests that run at the address still do
		if w.Drain.Load()&DrainAsked != 0 {
			fresh.Drain.Or(DrainAsked) // the operator drained the address
		}
	}
}

// nameless makes the worker that stands for the upstreams that are not told apart. It
// has no cache model.
func (p *Pool) nameless() *Worker {
	set := p.Settings.Load().Worker(dialOthers)
	set.DPSize, set.MaxRunning = 1, 0
	w := newWorker(set)
	p.Scheduler.Retire(w.Target(0))
	return w
}

// speakable returns whether an address can be that of a worker. A placeholder may yield
// anything, and addresses become labels of metrics.
func speakable(dial string) bool {
	if dial == "" || len(dial) > maxDial || !utf8.ValidString(dial) {
		return false
	}
	addr, err := caddy.ParseNetworkAddress(dial)
	return err == nil && addr.PortRangeSize() == 1
}

// isNamed returns whether the configuration has a worker's address.
func (s *Settings) isNamed(dial string) bool {
	return s.Upstreams[dial] && !strings.Contains(dial, "{")
}

// hasRoom returns whether one more worker may be made known that the configuration does
// not name. It drops the workers that were not seen for longest if there are too many.
// The lock is held.
func (p *Pool) hasRoom(t time.Time) bool {
	s := p.Settings.Load()
	if len(p.Workers) < maxOthers {
		return true
	}
	if t.Sub(p.swept) < time.Second {
		return p.others < maxOthers
	}
	p.swept, p.others = t, 0
	var idle []*Worker
	for dial, w := range p.Workers {
		if s.isNamed(dial) {
			continue
		}
		p.others++
		if t.Unix()-w.Seen.Load() > int64(othersKept/time.Second) && !w.Draining() {
			idle = append(idle, w)
		}
	}
	if p.others < maxOthers {
		return true
	}
	slices.SortFunc(idle, func(a, b *Worker) int { return int(a.Seen.Load() - b.Seen.Load()) })
	for _, w := range idle[:min(len(idle), maxOthers/4)] {
		if p.Drop(w) {
			p.others--
		}
	}
	return p.others < maxOthers
}

// Drop forgets a worker and its metrics, unless it has leases. The lock is held.
func (p *Pool) Drop(w *Worker) bool {
	defer p.Layout.Add(1)
	if !p.forgetRanks(w) {
		return false
	}
	delete(p.Workers, w.Dial)
	p.forgetCounts(w)
	return true
}

// IsUpstream returns whether a worker is an upstream: by the configuration, or lately by
// a placeholder or a dynamic source.
func (p *Pool) IsUpstream(s *Settings, w *Worker) bool {
	return s.Upstreams[w.Dial] || s.Others && p.LastRequest.Load()-w.Seen.Load() <= int64(currentFor/time.Second)
}

// currentFor is how long a worker that the configuration does not name counts as an
// upstream after it was offered to a request.
const currentFor = time.Minute

// forget drops workers that have been no upstreams for workerGrace. Dynamic upstreams
// are seen only by requests: their time ends at the last request.
func (p *Pool) forget(t time.Time) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.Scheduler.Retire(p.unnamed.Target(0)) // again: it remembers only so many
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
