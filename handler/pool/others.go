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

// IsCurrent returns whether a worker is an upstream: by the configuration, or lately by
// a placeholder or a dynamic source.
func (p *Pool) IsCurrent(s *Settings, w *Worker) bool {
	return s.Upstreams[w.Dial] || s.Others && p.Used.Load()-w.Seen.Load() <= int64(currentFor/time.Second)
}

// currentFor is how long a worker that the configuration does not name counts as an
// upstream after it was offered to a request.
const currentFor = time.Minute
