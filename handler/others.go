package handler

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

// nameless makes the worker that stands for the upstreams that are not told apart. It
// has no cache model.
func (p *pool) nameless() *worker {
	set := p.settings.Load().worker(dialOthers)
	set.DPSize, set.MaxRunning = 1, 0
	w := newWorker(set)
	p.scheduler.Retire(w.target(0))
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
func (s *poolSettings) isNamed(dial string) bool {
	return s.upstreams[dial] && !strings.Contains(dial, "{")
}

// hasRoom returns whether one more worker may be made known that the configuration does
// not name. It drops the workers that were not seen for longest if there are too many.
// The lock is held.
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

// drop forgets a worker and its metrics, unless it has leases. The lock is held.
func (p *pool) drop(w *worker) bool {
	defer p.layout.Add(1)
	if !p.forgetRanks(w) {
		return false
	}
	delete(p.workers, w.dial)
	p.forgetCounts(w)
	return true
}

// isCurrent returns whether a worker is an upstream: by the configuration, or lately by
// a placeholder or a dynamic source.
func (p *pool) isCurrent(s *poolSettings, w *worker) bool {
	return s.upstreams[w.dial] || s.others && p.used.Load()-w.seen.Load() <= int64(currentFor/time.Second)
}

// currentFor is how long a worker that the configuration does not name counts as an
// upstream after it was offered to a request.
const currentFor = time.Minute
