package pool

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Queued is a part of the requests that wait.
type Queued struct {
	Class    string  `json:"class"`
	Tenant   string  `json:"tenant,omitempty"`
	Requests int     `json:"requests"`
	Held     int     `json:"held"`           // of them, those that only wait for room
	Oldest   float64 `json:"oldest_seconds"` // since the first of them came
}

// mostTenants bounds the tenants that Queued returns.
const mostTenants = 10

// Queued returns the requests that wait, by class, and those of the tenants with the most.
func (p *Pool) Queued(t time.Time) (classes, tenants []Queued) {
	classes, tenants = []Queued{}, []Queued{}
	if p.Waiting() == 0 {
		return classes, tenants
	}
	type party struct {
		class, name string
		tenant      uint64
	}
	parts := make(map[party]*Queued)
	held := make(map[*lane]bool)
	add := func(of party, m *waiter) {
		one := parts[of]
		if one == nil {
			one = &Queued{Class: of.class, Tenant: of.name}
			parts[of] = one
		}
		if one.Requests++; held[m.lane] {
			one.Held++
		}
		one.Oldest = max(one.Oldest, t.Sub(m.since).Seconds())
	}
	p.queue.mu.Lock()
	for _, l := range p.queue.lanes {
		held[l] = l.isHeld(t)
	}
	p.queue.order.All(func(e *queue.Entry) {
		if m, ok := e.Value.(*waiter); ok {
			add(party{class: m.want.class()}, m)
			if m.want.Tenant != 0 {
				add(party{m.want.class(), m.want.TenantName, m.want.Tenant}, m)
			}
		}
	})
	p.queue.mu.Unlock()
	for of, one := range parts {
		if of.tenant == 0 {
			classes = append(classes, *one)
		} else {
			tenants = append(tenants, *one)
		}
	}
	most := func(a, b Queued) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Class, b.Class), cmp.Compare(a.Tenant, b.Tenant))
	}
	slices.SortFunc(classes, most)
	slices.SortFunc(tenants, most)
	return classes, tenants[:min(len(tenants), mostTenants)]
}

// WaitsNow returns the place of a request in the queue, and why it waits. ok: it does.
func (p *Pool) WaitsNow(id string, t time.Time) (of Queued, why []string, ok bool) {
	var m *waiter
	p.queue.mu.Lock()
	p.queue.order.All(func(e *queue.Entry) {
		if w := e.Value.(*waiter); w.want.ID == id { //nolint:forcetypeassert,errcheck // it has no other values
			m = w
		}
	})
	if m == nil {
		p.queue.mu.Unlock()
		return of, nil, false
	}
	lacks := WaitsForSlot
	if m.lane.isHeld(t) {
		lacks = WaitsForRoom
	}
	p.queue.mu.Unlock()
	of = Queued{Class: m.want.class(), Tenant: m.want.TenantName, Oldest: t.Sub(m.since).Seconds()}
	return of, append([]string{lacks}, p.WhyWait(&m.want, t)...), true
}

// WhyWait says why a request that came now would wait, from the queue's part.
func (p *Pool) WhyWait(want *Wants, t time.Time) (why []string) {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	own, less := 0.0, 0
	var others []float64
	p.queue.order.Tenants(func(class string, tenant uint64, service float64) {
		switch {
		case class != want.class():
		case tenant == want.Tenant:
			own = service
		default:
			others = append(others, service)
		}
	})
	for _, service := range others {
		if service < own {
			less++
		}
	}
	if n := p.queue.others.Load(); want.isBackground() && n > 0 {
		why = append(why, fmt.Sprintf("%d requests of other classes", n))
	}
	if less > 0 {
		why = append(why, fmt.Sprintf("%d tenants with less service", less))
	}
	switch left := want.left(t) / 1e3; {
	case want.Deadline.IsZero():
	case left < 0:
		why = append(why, fmt.Sprintf("deadline %.1f s ago", -left))
	default:
		why = append(why, fmt.Sprintf("deadline in %.1f s", left))
	}
	return why
}

// WouldHold returns whether a request would wait for room of the candidates.
func (p *Pool) WouldHold(want *Wants, c *Candidates) bool {
	background, need := want.isBackground(), p.roomNeeded(want, c.At)
	if need == kvscore.Clear {
		need = kvscore.RoomForSurplus(want.Prompt)
	}
	for i, at := range c.Targets {
		if room, _ := p.Scheduler.Room(c.At, at.Target); room >= need && (!background || p.isQuiet(c.Workers[i], at.Target, c.At)) {
			return !p.spares(want, c.offers, c.At)
		}
	}
	return true
}
