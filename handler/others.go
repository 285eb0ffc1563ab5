package handler

import (
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
)

const (
	// maxOthers bounds the workers of a pool that are no upstreams by the
	// configuration: those of placeholders and dynamic sources.
	maxOthers = 1024
	// othersKept is how long one of these is certainly remembered.
	othersKept = 10 * time.Second
	// maxDial is the longest address of one of these, in bytes.
	maxDial = 512
	// dialOthers is what the worker is called that stands for those which have
	// no name of their own.
	dialOthers = "(others)"
)

// nameless makes the worker that stands for the upstreams that are not told
// apart. Nothing is kept of it but what runs.
func (p *pool) nameless() *worker {
	set := p.settings.Load().worker(dialOthers)
	set.DPSize, set.MaxRunning = 1, 0
	w := newWorker(set)
	p.scheduler.Retire(w.target(0))
	return w
}

// speakable tells whether an address can be that of a worker. Where it comes
// from a placeholder, it may be anything, and it becomes a label of metrics.
func speakable(dial string) bool {
	if dial == "" || len(dial) > maxDial || !utf8.ValidString(dial) {
		return false
	}
	addr, err := caddy.ParseNetworkAddress(dial)
	return err == nil && addr.PortRangeSize() == 1
}

// isNamed tells whether the configuration has a worker's address.
func (s *poolSettings) isNamed(dial string) bool {
	return s.upstreams[dial] && !strings.Contains(dial, "{")
}

// hasRoom tells whether one more worker may be made known that the
// configuration does not name. If there are too many, those go that were not
// seen for longest. The lock is held.
func (p *pool) hasRoom(t time.Time) bool {
	s := p.settings.Load()
	if len(p.workers) < maxOthers {
		return true
	}
	if t.Sub(p.swept) < time.Second {
		return p.others < maxOthers
	}
	p.swept, p.others = t, 0
	var idle []*worker
	for dial, w := range p.workers {
		if s.isNamed(dial) {
			continue
		}
		p.others++
		if t.Unix()-w.seen.Load() > int64(othersKept/time.Second) && !w.draining() {
			idle = append(idle, w)
		}
	}
	if p.others < maxOthers {
		return true
	}
	slices.SortFunc(idle, func(a, b *worker) int { return int(a.seen.Load() - b.seen.Load()) })
	for _, w := range idle[:min(len(idle), maxOthers/4)] {
		if p.drop(w) {
			p.others--
		}
	}
	return p.others < maxOthers
}

// drop forgets a worker that has no leases, with its metrics, and tells whether
// it did. The lock is held.
func (p *pool) drop(w *worker) bool {
	defer p.layout.Add(1)
	if !p.forgetRanks(w) {
		return false
	}
	delete(p.workers, w.dial)
	p.forgetCounts(w)
	return true
}

// isCurrent tells whether a worker is an upstream: by the configuration, or
// lately, in terms of the requests, by a placeholder or a dynamic source.
func (p *pool) isCurrent(s *poolSettings, w *worker) bool {
	return s.upstreams[w.dial] || s.others && p.used.Load()-w.seen.Load() <= int64(currentFor/time.Second)
}

// currentFor is how long a worker that is named nowhere counts as an upstream
// after a request that could go to it.
const currentFor = time.Minute
