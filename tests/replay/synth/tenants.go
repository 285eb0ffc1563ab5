package synth

import (
	"math/rand/v2"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// InteractiveTenants is how many tenants Interactive has, from 0 on.
const InteractiveTenants = 10

// Tenants makes a trace of several tenants and classes.
type Tenants struct {
	m             *maker
	rate, seconds float64
}

// NewTenants returns a trace without requests. Those that come one by one come at a rate by second, for so many seconds.
func NewTenants(rate, seconds float64) *Tenants {
	m := &maker{Rand: rand.New(rand.NewPCG(1, 1))} //nolint:gosec // to be repeated
	m.trace = &trace.Trace{Name: "synth:tenants", BlockTokens: block, Sessions: true}
	return &Tenants{m, rate, seconds}
}

// Interactive adds ten tenants, each with questions of 1,000 tokens behind its system prompt of 2,000.
func (t *Tenants) Interactive() *Tenants {
	prompts := t.m.fleet(InteractiveTenants, 2000, 0.3)
	return t.each(func(at float64) {
		tenant := t.m.IntN(InteractiveTenants)
		t.ask(at, tenant, t.m.more(prompts[tenant], t.m.tokens(1000, 0.7)), t.m.tokens(120, 0.7))
	})
}

// Batch adds requests of one tenant that share nothing.
func (t *Tenants) Batch() *Tenants {
	return t.each(func(at float64) {
		t.ask(at, 0, t.m.fresh(min(30_000, t.m.tokens(1500, 0.8))), t.m.tokens(100, 0.8))
	})
}

// Flood adds n requests of a tenant that come at one time, and share nothing.
func (t *Tenants) Flood(at float64, n, tokens, tenant int) *Tenants {
	for range n {
		t.ask(at, tenant, t.m.fresh(tokens), 100)
	}
	return t
}

// Class puts the requests of tenants from one on into a class.
func (t *Tenants) Class(from int, c queue.Class) *Tenants {
	t.m.trace.Classes = []queue.Class{{}, c}
	for i := range t.m.trace.Requests {
		if q := &t.m.trace.Requests[i]; q.Tenant >= from {
			q.Class = 1
		}
	}
	return t
}

// Target gives all requests a target of the time to the first token.
func (t *Tenants) Target(ttft time.Duration, late queue.Late) *Tenants {
	t.m.trace.Classes = []queue.Class{{TTFT: ttft, Late: late}}
	return t
}

// Weights sets the weights of the tenants.
func (t *Tenants) Weights(weights ...float64) *Tenants {
	t.m.trace.Weights = weights
	return t
}

// Trace returns the trace.
func (t *Tenants) Trace() *trace.Trace {
	t.m.trace.Sort()
	return t.m.trace
}

func (t *Tenants) each(add func(at float64)) *Tenants {
	for at := t.m.gap(t.rate); at < t.seconds; at += t.m.gap(t.rate) {
		add(at)
	}
	return t
}

func (t *Tenants) ask(at float64, tenant int, p prompt, answer int) {
	t.m.ask(at, t.m.session(), 0, p, answer, 0)
	t.m.trace.Requests[len(t.m.trace.Requests)-1].Tenant = tenant
}
