// Package trace reads request traces for replay: JSON lines, plain or gzipped.
// It does not make traces and does not keep the text of prompts.
package trace

import (
	"cmp"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/queue"
)

// Trace is a list of requests in the order of their arrival.
type Trace struct {
	// Name is the trace's own name, or the name of its file.
	Name string
	// BlockTokens is the number of tokens in one block.
	BlockTokens int
	// Closed says that each turn of a session follows the end of the turn before.
	Closed bool
	// Sessions says that the trace names the session of each request.
	Sessions bool
	// AtOnce says that all clients begin at one time, which counts: there is no warm-up.
	AtOnce bool
	// Classes and Weights are those of the requests' classes and tenants; without them, there is one
	// of each.
	Classes []queue.Class
	Weights []float64
	// Requests are sorted by arrival, in a closed loop by session and turn.
	Requests []Request
}

// Request is one request of a trace.
type Request struct {
	// At is the arrival since the start of the trace. In a closed loop it counts
	// for the first turn of a session only.
	At time.Duration
	// Think is the time between the end of the turn before and this request, in
	// a closed loop.
	Think time.Duration
	// In and Out are the tokens of prompt and answer.
	In, Out int
	// Session and Turn say which turn of which session this is; both are 0 if
	// the trace has no sessions.
	Session, Turn int
	// Class and Tenant are positions in the trace's Classes and Weights.
	Class, Tenant int
	// Blocks are the hashes of the prompt's full blocks. Equal hashes stand for
	// equal prefixes.
	Blocks []uint64
}

// Class returns the class of a request; nil if there is none.
func (t *Trace) Class(q *Request) *queue.Class {
	if q.Class >= len(t.Classes) {
		return nil
	}
	return &t.Classes[q.Class]
}

// Weight returns the weight of a request's tenant.
func (t *Trace) Weight(q *Request) float64 {
	if q.Tenant >= len(t.Weights) {
		return 1
	}
	return t.Weights[q.Tenant]
}

// Shared returns the trace with its sessions shared out among tenants, by turns. Requests without a session are
// shared out themselves.
func (t *Trace) Shared(tenants int) *Trace {
	c := *t
	c.Requests = slices.Clone(t.Requests)
	for i := range c.Requests {
		q := &c.Requests[i]
		if q.Tenant = i; t.Sessions {
			q.Tenant = q.Session
		}
		q.Tenant %= tenants
	}
	return &c
}

// Sort brings the requests into the order that a trace has.
func (t *Trace) Sort() {
	slices.SortStableFunc(t.Requests, func(a, b Request) int {
		if t.Closed {
			return cmp.Or(cmp.Compare(a.Session, b.Session), cmp.Compare(a.Turn, b.Turn))
		}
		return cmp.Compare(a.At, b.At)
	})
}

// Spread spreads requests with one arrival evenly up to the next arrival: a trace may have its times
// in whole seconds. It changes no closed loop.
func (t *Trace) Spread() {
	q := t.Requests
	for i := 0; i < len(q) && !t.Closed; {
		end := i
		for end < len(q) && q[end].At == q[i].At {
			end++
		}
		if end == len(q) {
			return
		}
		at, gap := q[i].At, q[end].At-q[i].At
		for k := range end - i {
			q[i+k].At = at + gap*time.Duration(k)/time.Duration(end-i)
		}
		i = end
	}
}

// maxID bounds the block ids of a trace; Answer uses the numbers above.
const maxID = 1 << 62

// Hash returns the hash of the block with an id below 1<<62.
func Hash(id uint64) uint64 { return mix(id) }

// Answer returns the hash of a block that request number n of a replay generates.
// No trace and no other request has it.
func Answer(n, block int) uint64 {
	return mix(maxID | uint64(n)<<24 | uint64(block))
}

// mix scatters the bits of x, and is one-to-one: the output function of
// SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Arrivals returns when each request arrives; in a closed loop, when it would if no answer took
// any time.
func (t *Trace) Arrivals() []time.Duration {
	all, at := make([]time.Duration, len(t.Requests)), time.Duration(0)
	for i := range t.Requests {
		q := &t.Requests[i]
		if at += q.Think; !t.Closed || i == 0 || t.Requests[i-1].Session != q.Session {
			at = q.At
		}
		all[i] = at
	}
	return all
}

// Duration returns the last of Arrivals.
func (t *Trace) Duration() time.Duration { return slices.Max(append(t.Arrivals(), 0)) }

// MeanThink returns the mean time between the end of a turn and the next one, in a
// closed loop. It is 0 if no session has two turns.
func (t *Trace) MeanThink() time.Duration {
	var sum time.Duration
	n := 0
	for i := range t.Requests {
		if i > 0 && t.Requests[i-1].Session == t.Requests[i].Session {
			sum += t.Requests[i].Think
			n++
		}
	}
	return sum / time.Duration(max(1, n))
}
