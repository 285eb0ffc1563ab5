// Package sim replays a trace in virtual time: the router's scheduler, index,
// leases and policies against modelled engines. It has no router logic of its own.
package sim

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/rules"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// Config is one cell of a replay.
type Config struct {
	// Trace is what is replayed. It is only read.
	Trace *trace.Trace
	// Policy is a name of Policies.
	Policy string
	// Cluster is what the trace is replayed against.
	Cluster
	// Speed divides the times of the trace, think times included.
	Speed float64
	// Seed is for what chance decides.
	Seed uint64
	// Exact shows the engines' blocks to the policies. With Learned, prompts are text, whose blocks of
	// tokens the router learns from late events.
	Exact, Learned bool
	// Sessions binds the requests of a session to one engine.
	Sessions bool
	// Places is the engine of each request. With it, there are neither routers nor a policy.
	Places []int
	// Counted tells which requests the figures are of; nil: all after the warm-up.
	Counted []bool
	Routers
	Queue
}

const (
	// upkeep is how often the router looks for expired leases.
	upkeep = 10 * time.Second
	// jitter bounds what chance adds to an arrival.
	jitter = 5 * time.Millisecond
)

// epoch is the beginning of virtual time.
var epoch = time.Unix(1_700_000_000, 0)

// request is a request of the trace on its way.
type request struct {
	engine.Job
	ahead     phase
	lease     *kvscore.Lease
	router    *router
	version   affinity.Version // of the session's binding
	at        int              // engine
	booked    int              // blocks of prompt and answer that the lease was told of
	elsewhere bool             // than the session is bound to: its next turn is there again
	arrived   time.Duration
	first     time.Duration
	ended     time.Duration
	session   string // that the events name
	waiting
}

// replay is a cell in progress.
type replay struct {
	Config
	spec     *spec
	routers  []*router
	tellings int
	informed int            // events
	observer rules.Observer // the policy, if it is one
	view     rules.View
	requests []request
	engines  []*engine.Engine
	stepping []bool
	targets  []kvscore.Target // of all engines
	events   events
	tally    tally
	now      time.Duration
	whole    time.Duration // of the trace
	swept    time.Duration
	err      error
	answer   []uint64
	over     int
	split    int // requests
}

// Run replays one cell.
func Run(c Config) (*Result, error) {
	r, err := replayed(c)
	if err != nil {
		return nil, err
	}
	return r.result(), nil
}

// begun returns a cell at its beginning.
func begun(c Config) (*replay, error) {
	sp, err := c.check()
	if err != nil {
		return nil, err
	}
	r := &replay{Config: c, spec: sp}
	if err := r.build(); err != nil {
		return nil, err
	}
	r.arrivals()
	return r, nil
}

// replayed returns a cell that has come to its end.
func replayed(c Config) (*replay, error) {
	r, err := begun(c)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, o := range r.routers {
			if o.sessions != nil {
				_ = o.sessions.store.Close()
			}
		}
	}()
	r.run(func() bool { return false })
	switch {
	case r.err != nil:
		return nil, r.err
	case r.over != len(c.Trace.Requests):
		return nil, fmt.Errorf("%d of %d requests never ended", len(c.Trace.Requests)-r.over, len(c.Trace.Requests))
	case r.leases() != 0:
		return nil, fmt.Errorf("%d leases never ended", r.leases())
	case len(r.tally.ttft) == 0:
		return nil, errors.New("no request arrives after the warm-up")
	}
	return r, nil
}

// run lets happen what comes next, until there is nothing or stop says so.
func (r *replay) run(stop func() bool) {
	for len(r.events) > 0 && r.err == nil && !stop() {
		e := r.events.pop()
		r.setTime(e.at)
		r.upkeep()
		switch {
		case e.tell != nil:
			r.hear(e.tell)
		case e.do != nil:
			e.do()
		case e.moved:
			r.moved(&r.requests[e.n])
		case e.arrival:
			r.arrive(e.n)
		default:
			r.step(e.n)
		}
		r.tell()
	}
}

func (c *Config) check() (*spec, error) {
	sp, err := find(c.Policy)
	switch {
	case err != nil:
		return nil, err
	case !(c.Speed > 0):
		return nil, fmt.Errorf("speed is %v, want more than 0", c.Speed)
	case sp.Kind.Sessions && !c.Trace.Sessions:
		return nil, fmt.Errorf("the policy %s needs sessions, and the trace has none", c.Policy)
	case c.Number > 1 && sp.comparison:
		return nil, fmt.Errorf("there is one router only of %s", c.Policy)
	case c.Prefill > 0 && (sp.comparison || c.Exact || c.Number > 1):
		return nil, errors.New("requests are split by one router, with policies of the router, and without exact knowledge")
	case c.Sessions && !c.Trace.Sessions:
		return nil, errors.New("the trace has no sessions")
	}
	if err := c.Cluster.check(c.Trace); err != nil {
		return nil, err
	}
	return sp, nil
}

// build makes engines, scheduler and policy.
func (r *replay) build() error {
	r.requests, r.whole = make([]request, len(r.Trace.Requests)), r.Trace.Duration()
	r.view = rules.View{Block: r.Trace.BlockTokens, Exact: r.Exact, Model: r.Engine}
	if r.Places != nil {
		r.buildCluster()
		return nil
	}
	if err := r.buildRouters(); err != nil {
		return err
	}
	r.buildCluster()
	r.observer, _ = r.routers[0].policy.(rules.Observer)
	if r.Exact && !r.spec.comparison {
		r.follow()
	}
	return nil
}

// leases returns how many leases have not ended.
func (r *replay) leases() (n int) {
	for _, o := range r.routers {
		n += o.scheduler.Stats().Leases
	}
	return n
}

// arrivals schedules what does not depend on the end of another request. For an
// open loop that is the first arrival, for a closed one the first of each session.
func (r *replay) arrivals() {
	r.tally.begin(r)
	for i := range r.Trace.Requests {
		q := &r.Trace.Requests[i]
		if i == 0 || r.Trace.Closed && r.Trace.Requests[i-1].Session != q.Session {
			r.events.push(event{at: r.arrival(i), arrival: true, n: i})
		}
	}
}

// arrival returns when the router gets a request that waits for no other. No two
// runs of the same clients are the same: the seed adds up to jitter to each.
func (r *replay) arrival(n int) time.Duration {
	late := rand.New(rand.NewPCG(r.Seed, uint64(n))).Int64N(int64(jitter)) //nolint:gosec // to be repeated
	return r.scaled(r.Trace.Requests[n].At) + time.Duration(late)
}

// arrive places a request. In an open loop the next arrival follows it.
func (r *replay) arrive(n int) {
	if !r.Trace.Closed && n+1 < len(r.Trace.Requests) {
		r.events.push(event{at: max(r.now, r.arrival(n+1)), arrival: true, n: n + 1})
	}
	r.place(n)
}

func (r *replay) scaled(t time.Duration) time.Duration { return time.Duration(float64(t) / r.Speed) }

func (r *replay) setTime(t time.Duration) {
	r.now, r.view.Now = t, t
	r.slow()
	for _, o := range r.routers {
		if o.sessions != nil {
			o.sessions.now.Store(int64(t))
		}
	}
}

func (r *replay) clock() time.Time { return epoch.Add(r.now) }

// upkeep does what the router does every now and then.
func (r *replay) upkeep() {
	if r.Places == nil && r.now-r.swept >= upkeep {
		r.swept = r.now
		r.outputs(true)
		for _, o := range r.routers {
			o.scheduler.Expire(r.clock())
		}
	}
}

// outputs brings the leases up to what the engines have generated. A router sees
// each token; nobody looks at the books in between. The books change with each
// block only; the other tokens are signs of life.
func (r *replay) outputs(alive bool) {
	now := r.clock()
	for _, e := range r.view.Engines {
		e.Decoding(func(j *engine.Job, tokens int) {
			q := &r.requests[j.Number]
			if blocks := (j.In + tokens - 1) / kvscore.DefaultBlockSize; alive || blocks > q.booked {
				q.booked = blocks
				q.lease.Output(now, int64(tokens))
			}
		})
	}
}

// place lets the policy choose for a request, and sends it there.
func (r *replay) place(n int) {
	t, q := &r.Trace.Requests[n], &r.requests[n]
	q.Job = engine.Job{Number: n, Chain: t.Blocks, In: t.In, Out: t.Out, Answer: func(i int) uint64 { return trace.Answer(n, i) }}
	q.arrived = r.now
	if r.Places != nil {
		q.at = r.Places[n]
		r.send(q)
		return
	}
	q.router = r.route(n)
	if r.Queue.Hold {
		r.enter(q)
		return
	}
	r.outputs(false)
	r.seat(q, -1)
}

// ask returns what a scheduler must know of a request, and the position of the engine that it is bound to,
// or -1.
func (r *replay) ask(q *request) (ask kvscore.Request, bound int) {
	t, o, block := &r.Trace.Requests[q.Number], q.router, r.Trace.BlockTokens
	ask = kvscore.Request{Prompt: cache.Prompt{Root: r.Seed, Blocks: t.Blocks, BlockTokens: float64(block), Past: float32(t.In%block) / float32(block), Tokens: int64(t.In)}, Streamed: true}
	switch {
	case r.Learned && !r.spec.comparison:
		ask.Identities = []cache.Identity{{BlockTokens: block, Root: r.Seed}}
		r.asText(&ask.Prompt, t.In)
	case r.Exact:
		ask.Identities = []cache.Identity{{BlockTokens: block, Root: r.Seed, Blocks: t.Blocks}}
	}
	r.view.Session = t.Session
	bound = -1
	if o.sessions != nil {
		bound, q.version = o.sessions.bound(t.Session)
		if r.spec.soft && bound >= 0 {
			ask.BoundTarget, bound = o.refs[bound].Target, -1
		}
	}
	return ask, bound
}

// seat books a request and sends it to its engine: the one at a position, or if that is -1, the policy's
// choice.
func (r *replay) seat(q *request, at int) {
	o := q.router
	ask, bound := r.ask(q)
	if at >= 0 {
		bound = at
	}
	if r.Prefill > 0 {
		r.placePhases(q, &ask, bound)
		return
	}
	q.at, q.lease = o.scheduler.Select(r.clock(), &ask, o.refs, bound, o.policy, &o.selection)
	if r.Learned {
		q.session = cache.NewSession(ask.Prefixes) // as requests to vLLM name themselves
		q.lease.Named(q.session)
	}
	q.elsewhere = ask.BoundTarget != (kvscore.Target{}) && q.lease.Target() != ask.BoundTarget && o.selection.BoundTargetHolds()
	if r.observer != nil {
		r.observer.Placed(&o.selection, q.Number, q.at)
	}
	r.send(q)
}

// send gives a request to its engine.
func (r *replay) send(q *request) {
	r.engines[q.at].Add(&q.Job)
	r.begin(q.at)
}

// begin lets an idle engine begin a step.
func (r *replay) begin(at int) {
	if r.stepping[at] {
		return
	}
	if took, ok := r.engines[at].Begin(); ok {
		r.stepping[at] = true
		r.events.push(event{at: r.now + took, n: at})
	}
}

// step ends the step of an engine.
func (r *replay) step(at int) {
	r.stepping[at] = false
	first, over := r.engines[at].End()
	for _, j := range first {
		q := &r.requests[j.Number]
		if j == &q.ahead.Job {
			r.prefilled(q)
			continue
		}
		q.first = r.now
		if r.Queue.Hold {
			q.router.queue.begun(q)
		}
		if q.lease == nil {
			continue
		}
		q.lease.FirstToken(r.clock())
		q.lease.Output(r.clock(), 1)
		if r.observer != nil {
			r.observer.FirstToken(j.Number, at)
		}
		if s := q.router.sessions; s != nil && r.err == nil && !q.elsewhere {
			// The store names an engine by its position.
			r.err = s.answered(r.Trace.Requests[j.Number].Session, q.version, kvscore.Target{Worker: uint64(at) + 1})
		}
	}
	for _, j := range over {
		if q := &r.requests[j.Number]; j == &q.Job {
			r.end(q)
		}
	}
	r.begin(at)
	if len(first)+len(over) > 0 {
		for _, o := range r.routers {
			r.dispatch(o)
		}
	}
	if r.spec.Reference { // others may have waited for memory
		for i := range r.engines {
			r.begin(i)
		}
	}
}

// end ends a request.
func (r *replay) end(q *request) {
	if q.lease != nil {
		r.tellEnd(q)
	}
	q.ended = r.now
	r.tally.ended(r.now, q.Number, q)
	r.next(q.Number)
	r.over++
}

// tellEnd tells the request's router of its end.
func (r *replay) tellEnd(q *request) {
	in, out := int64(q.In), int64(q.Out)
	block := r.Trace.BlockTokens
	if q.ahead.lease != nil {
		q.Cached = q.ahead.Cached // as engines say
	}
	q.lease.Output(r.clock(), out)
	r.answer = q.Chained(r.answer[:0], block)
	answer, past := r.answer, float32((q.In+q.Out-1)%block)/float32(block)
	if r.Learned {
		answer, past = textOf(r.answer, block, q.In+q.Out-1)
	}
	q.lease.Counted(kvscore.Counts{Prompt: in, Cached: int64(q.Cached), CachedReported: true, Answer: in + out - 1, AnswerPast: past})
	q.lease.End(true, answer)
	if s := q.router.sessions; s != nil {
		s.ended(r.Trace.Requests[q.Number].Session)
	}
	q.lease = nil
}

// next schedules the next turn of a session, in a closed loop.
func (r *replay) next(n int) {
	if !r.Trace.Closed || n+1 == len(r.Trace.Requests) {
		return
	}
	if q := &r.Trace.Requests[n+1]; q.Session == r.Trace.Requests[n].Session {
		r.events.push(event{at: r.now + r.scaled(q.Think), arrival: true, n: n + 1})
	}
}
