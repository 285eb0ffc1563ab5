package sim

import (
	"cmp"
	"math"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Queue says how requests wait in the routers, in the order of package queue.
type Queue struct {
	// Hold has requests wait while no target has room. The policy then chooses among all targets.
	Hold bool
	// Step is how many tokens an engine computes in a step, as a router assumes. A target has room for a
	// router if less than its share of Depth steps of its own requests is booked there. Routers have equal shares,
	// because they do not see at once what others do. A target also has room if little of all that is booked
	// there is left, as predicted: Depth steps, one at most.
	Step, Depth float64
	// Spare is the share of the targets that background requests leave without a prefill, while others come.
	Spare float64
	// Wrong multiplies all predicted times. 0 stands for 1.
	Wrong float64
	// Served is the number of a request that is never refused, counted from 1; 0 is none.
	Served int
}

// waiting is what the queue knows of a request.
type waiting struct {
	entry    queue.Entry
	cost     float64 // predicted for its prefill when it came, in milliseconds
	foreseen float64 // time to its first token, in milliseconds, if it has a target
	lacks    float64 // tokens, once it has a seat
	waits    bool    // until it is refused
	refused  bool
}

// line is the queue of a router.
type line struct {
	queue.Queue
	off    float64         // see begun
	looks  time.Duration   // when the router looks at its targets again
	room   []kvscore.Room  // of each target
	idle   []bool          // targets with nothing booked
	spares bool            // more of them are idle than background requests must leave
	others time.Duration   // when a request of no background class last came
	since  []time.Duration // when each target last had something booked
	booked []float64       // tokens that this router's requests have to compute on each target
	shares time.Duration   // until when other routers' targets have no room, after a long prompt
}

// lane is requests that may take the same targets: those of background classes, or the others.
type lane bool

const background lane = true

// enter has a request wait in its router.
func (r *replay) enter(q *request) {
	r.outputs(false)
	l, t, s := &q.router.queue, &r.Trace.Requests[q.Number], &q.router.dry
	if !r.isBackground(q) {
		for _, o := range r.routers { // as their journals tell
			o.queue.others = r.now
		}
	}
	r.look(q.router)
	at := r.choose(q)
	q.cost = s.Candidates[at].PrefillTime
	q.entry = queue.Entry{
		Class: r.Trace.Class(t), Tenant: uint64(t.Tenant), Weight: r.Trace.Weight(t), Arrival: r.clock(), //nolint:gosec // not negative
		Cost: q.cost, Value: q, Lane: lane(r.isBackground(q)),
	}
	e := &q.entry
	e.Surplus = kvscore.RoomForSurplus(s.Tokens - s.Candidates[at].OverlapTokens)
	if e.Class != nil && e.Class.TTFT > 0 && r.isLate(q) {
		r.refuse(q)
		return
	}
	l.Push(e, r.clock())
	r.dispatch(q.router)
}

func (r *replay) isBackground(q *request) bool {
	c := r.Trace.Class(&r.Trace.Requests[q.Number])
	return c != nil && c.Background
}

// isLate tells whether a request is to be refused, for its first token is not foreseen in time. If not, that may
// come later.
func (r *replay) isLate(q *request) bool {
	l, e, s := &q.router.queue, &q.entry, &q.router.dry
	target := e.Class.TTFT
	e.Deadline = r.clock().Add(target)
	soonest := math.Inf(1)
	for i := range s.Candidates {
		soonest = min(soonest, s.Candidates[i].TTFT())
	}
	q.foreseen = soonest + l.Ahead(e)/float64(len(r.targets))
	if e.Class.Late != queue.Refuse || q.Number+1 == r.Served {
		return false
	}
	q.waits = true
	r.later(target-time.Duration(soonest*float64(time.Millisecond)), func() {
		if q.waits {
			l.Remove(e)
			r.refuse(q)
		}
	})
	return q.foreseen*math.Exp(l.off) > milliseconds(target)
}

// refuse ends a request without an answer.
func (r *replay) refuse(q *request) {
	q.refused, q.waits = true, false
	r.over++
	r.next(q.Number)
}

// dispatch seats all that may go now.
func (r *replay) dispatch(o *router) {
	if o.queue.Len() > 0 {
		r.outputs(false)
	}
	for o.queue.Len() > 0 {
		r.look(o)
		e := o.queue.First(o.queue.may, false, r.clock())
		if e == nil {
			return
		}
		r.take(e)
	}
}

// begun takes in the first token of a request: how far off what the router foresaw was. off becomes the logarithm
// of the factor that nine in ten requests are below.
func (l *line) begun(q *request) {
	const step = 0.02
	l.booked[q.at] -= q.lacks
	if q.foreseen == 0 {
		return
	}
	if l.off -= 0.1 * step; math.Log(milliseconds(q.first-q.arrived)/q.foreseen) > l.off {
		l.off += step
	}
}

// may tells whether a request of a lane may go.
func (l *line) may(key any, room kvscore.Room) bool {
	of := key.(lane) //nolint:forcetypeassert,errcheck // there are no others
	for i := range l.room {
		if of == background && l.spares && l.idle[i] || of != background && l.room[i] >= room {
			return true
		}
	}
	return false
}

// take seats a request that waits, and charges its tenant.
func (r *replay) take(e *queue.Entry) {
	q := e.Value.(*request) //nolint:forcetypeassert,errcheck // there are no others
	l, at := &q.router.queue, -1
	if e.Lane == background {
		r.choose(q)
		at = l.cheapestIdle(&q.router.dry)
	}
	q.waits = false
	r.seat(q, at)
	s := &q.router.selection
	c := &s.Candidates[q.at]
	q.lacks = float64(s.Tokens - c.OverlapTokens)
	if l.booked[q.at] += q.lacks; 2*q.lacks >= r.Queue.Step {
		l.shares = r.now + clearFor
	}
	work := s.Latency.Service(s.Tokens-c.OverlapTokens, c.OverlapTokens) + s.Latency.Token*s.ExpectedAnswer
	charge := func(o *router, work float64) { o.queue.Charge(e.Class, e.Tenant, e.Weight, work, r.clock()) }
	charge(q.router, work)
	l.Remove(e)
	for _, o := range r.routers {
		if o != q.router && r.Share {
			r.later(r.Late, func() { charge(o, queue.RemoteShare*work) })
		}
	}
}

const (
	// clearTokens is how much prefill a clear target has at most. One of another router has had nothing for clearFor.
	clearTokens = 1024
	clearFor    = 50 * time.Millisecond
	// sharedFor is how long background requests leave targets to others after the last of these.
	sharedFor = 30 * time.Second
)

// cheapestIdle returns the cheapest target with nothing booked; -1 if there is none.
func (l *line) cheapestIdle(s *kvscore.Selection) int {
	at := -1
	for i := range s.Candidates {
		if l.idle[i] && (at < 0 || s.Candidates[i].Cost < s.Candidates[at].Cost) {
			at = i
		}
	}
	return at
}

// choose returns what the policy would choose, and leaves the terms in the router's dry selection.
func (r *replay) choose(q *request) int {
	ask, bound := r.ask(q)
	o := q.router
	return o.scheduler.Explain(r.clock(), &ask, o.refs, bound, o.policy, &o.dry).Chosen
}

// look finds out which targets have room, and has the router look again when one is predicted to.
func (r *replay) look(o *router) {
	l, s, soon := &o.queue, &o.dry, math.Inf(1)
	if n := len(r.targets); l.room == nil {
		l.room, l.idle, l.since = make([]kvscore.Room, n), make([]bool, n), make([]time.Duration, n)
		l.booked = make([]float64, n)
		l.Parallel = n
	}
	o.scheduler.Explain(r.clock(), new(kvscore.Request), o.refs, 0, o.policy, s)
	idle := 0
	for i := range s.Candidates {
		c := &s.Candidates[i]
		left := cmp.Or(r.Wrong, 1) * c.Slowness * s.Latency.Prefill(int64(min(1, r.Queue.Depth)*r.Queue.Step), 0, 0)
		if l.idle[i] = c.PrefillTokens == 0; l.idle[i] {
			idle++
		} else {
			l.since[i] = r.now
		}
		n := len(r.routers)
		others := n > 1 && r.routers[i%n] != o
		switch {
		case others && r.now < l.shares:
			l.room[i], soon = kvscore.NoRoom, min(soon, milliseconds(l.shares-r.now))
		case l.booked[i] >= r.Queue.Depth*r.Queue.Step/float64(n) && c.WaitTime > left:
			l.room[i], soon = kvscore.NoRoom, min(soon, c.WaitTime-left)
		case others && r.now-l.since[i] < clearFor:
			l.room[i], soon = kvscore.SomeRoom, min(soon, c.WaitTime+milliseconds(clearFor))
		case !others && c.PrefillTokens >= clearTokens:
			l.room[i], soon = kvscore.SomeRoom, min(soon, c.WaitTime)
		case l.idle[i]:
			l.room[i] = kvscore.Empty
		default:
			l.room[i], soon = kvscore.Clear, min(soon, c.WaitTime)
		}
	}
	l.spares = float64(idle) > r.Spare*float64(len(r.targets)) || r.now-l.others >= sharedFor
	if math.IsInf(soon, 1) || l.Len() == 0 {
		return
	}
	in := max(time.Millisecond, time.Duration(soon*float64(time.Millisecond)))
	if l.looks <= r.now || r.now+in < l.looks {
		l.looks = r.now + in
		r.later(in, func() { r.dispatch(o) })
	}
}

// later does something in a while.
func (r *replay) later(in time.Duration, do func()) {
	r.events.push(event{at: r.now + in, n: r.tellings, do: do})
	r.tellings++
}

// wrong is a policy that sees wrong times.
type wrong struct {
	kvscore.Policy
	factor float64
}

// Choose implements kvscore.Policy.
func (w wrong) Choose(s *kvscore.Selection) int {
	for i := range s.Candidates {
		c := &s.Candidates[i]
		c.WaitTime, c.PrefillTime = w.factor*c.WaitTime, w.factor*c.PrefillTime
	}
	return w.Policy.Choose(s)
}
