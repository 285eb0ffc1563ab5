package pool

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Candidates are the targets that a request may choose, and the buffers of one choice. They
// grow with the pool, so requests share them: one is valid only while a request chooses.
type Candidates struct {
	At        time.Time
	Targets   []kvscore.TargetRef
	Upstreams []*reverseproxy.Upstream // of targets
	Workers   []*worker.Worker         // of targets
	Full      []*worker.Worker         // left out only because they are full
	Tier      Verdict                  // of the targets: Fits, or what the router puts up with
	Granted   bool                     // the queue has granted a slot of the only worker
	spare     bool                     // a backup that is left out has a free slot
	offers    Offers                   // of which these are

	Sel     kvscore.Selection
	Factors []float64       // of targets: the client's preferences
	Ways    []kvscore.Way   // of targets, if the request may be split
	Scored  kvscore.Request // the request with these
	Shadow  []kvscore.Candidate
	Past    []observe.PastCandidate
}

// Chooser is a request that wants a seat.
type Chooser interface {
	// Choose says how to choose among candidates. The pool holds no lock.
	Choose(context.Context, *Candidates) Choice
	// Chosen sees the chosen candidate's position, and whether the request or its session
	// decided.
	Chosen(c *Candidates, i int, unpriced bool)
	// Waits is called before the request waits in the queue, with why.
	Waits(why string)
	// Renew returns the present offers. follows says that they come from a source that knows at
	// once when they change. The pool holds no lock.
	Renew() (o Offers, follows bool)
}

// Choice says how to choose among candidates.
type Choice struct {
	Request *kvscore.Request
	Policy  kvscore.Policy
	Bound   int // position of the target that the request or its session decides on; -1 if none
	// SessionWorker is the session's worker, if that is full and the request waits for it; nil otherwise.
	SessionWorker *worker.Worker
	// Wait is what the request must wait for before it chooses again; nil if nothing.
	Wait func(context.Context) error
}

// Why requests wait.
const (
	WaitsForSlot = "all workers are full"
	WaitsForRoom = "no worker has room"
)

// Candidates gathers the targets of workers that are free, and the best there are. If the
// queue has granted a slot of a worker, that one is free for the request, and the others may count as
// full. granted may be nil. The caller returns the candidates.
func (p *Pool) Candidates(want *Wants, o Offers, granted *grant, t time.Time) *Candidates {
	c, ok := p.gathered.Get().(*Candidates)
	if !ok {
		c = &Candidates{Sel: kvscore.Selection{Rand: newRandom()}}
	}
	c.Targets, c.Upstreams, c.Workers, c.Full = c.Targets[:0], c.Upstreams[:0], c.Workers[:0], c.Full[:0]
	c.Granted = granted != nil && granted.worker != nil
	c.At, c.Tier, c.spare, c.offers = t, Tried-1, false, o
	j := p.judgment(want, o, t)
	for i, up := range o.Ups {
		row := &o.Table.Rows[i]
		w := row.Worker
		v := j.of(up, row)
		full := v.State() == Full || v > Full && v.Possible() && j.isFull(w)
		if c.Granted && w == granted.worker && v.Possible() {
			v, full = Fits, false
		} else if c.Granted && granted.only {
			full = true
		}
		v = v.tier()
		c.spare = c.spare || v == Backup && !full
		if v > c.Tier || row.Repeated && slices.Contains(c.Workers, w) {
			continue
		}
		if v < c.Tier { // the workers so far are worse
			c.Targets, c.Upstreams, c.Workers, c.Full, c.Tier = c.Targets[:0], c.Upstreams[:0], c.Workers[:0], c.Full[:0], v
		}
		if full {
			c.Full = append(c.Full, w)
			continue
		}
		for rank, target := range row.Targets {
			if want.Rank == AnyRank || want.Rank == int64(rank) {
				c.Targets, c.Upstreams, c.Workers = append(c.Targets, target), append(c.Upstreams, up), append(c.Workers, w)
			}
		}
	}
	return c
}

// Return takes the candidates back.
func (p *Pool) Return(c *Candidates) {
	c.Sel.Blocks, c.Sel.Override, c.Sel.Needs, c.Sel.Quiet = nil, nil, kvscore.NoRoom, false
	c.Scored = kvscore.Request{}
	p.gathered.Put(c)
}

// newRandom returns a source of randomness for one goroutine at a time.
func newRandom() *rand.Rand {
	return rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())) //nolint:gosec // choices are no secrets
}

// SeatAt takes a place on a target for a request of the router's own, if a slot is free. Such
// a request shows nothing of the worker's health.
func (p *Pool) SeatAt(w *worker.Worker, t kvscore.Target, r *kvscore.Request, s *Seat) bool {
	if !w.TakeSlot() {
		return false
	}
	var sel kvscore.Selection
	s.Worker, s.Target, s.Begun, s.pool, s.slot = w, t, time.Now(), p, true
	_, s.Lease = p.Scheduler.Select(s.Begun, r, p.Scheduler.Refs(t), 0, nil, &sel)
	return true
}

// Seat is an attempt's place on a worker: its booking, its slot, and its part in what the
// worker shows. Leave ends all of it, once.
type Seat struct {
	*kvscore.Lease // its booking; nil before it is taken
	worker.Attempt
	Target   kvscore.Target // the worker's rank
	Upstream *reverseproxy.Upstream
	Terms    kvscore.Candidate
	Tokens   int64 // the prompt's, as estimated; 0 is unknown
	Known    kvscore.Known
	Among    int  // number of candidates
	Unpriced bool // the request or its session decided, and no policy gave a cost
	// Predicted is when the first token was predicted to come, at the request's first choice.
	Predicted time.Time
	Demoted   bool // see Wants

	pool    *Pool
	bill    bill
	soonest float64 // the least predicted time to the first token, in milliseconds, of a promised request
	slot    bool    // it has a slot of the worker
	left    bool
}

// Leave ends the attempt. computed: the worker has computed the prompt. A nil answer is unknown.
// Only the first call counts.
func (s *Seat) Leave(computed bool, answer []uint64) {
	if s.left {
		return
	}
	s.left = true
	if s.Lease != nil {
		s.Lease.End(computed, answer) // first: what it books must not outlive a panic below
		if s.bill.account != nil {
			s.pool.queue.settle(&s.bill, s.Work(time.Now()))
		}
	}
	if s.slot {
		s.slot = false
		s.pool.queue.free(s.Worker)
	}
	s.Exit()
}

// Left returns whether the attempt has ended.
func (s *Seat) Left() bool { return s.left }

// FirstToken records the first token. The prefills of a hung worker or a backup are not measured.
func (s *Seat) FirstToken(t time.Time) {
	if s.Worker.IsHung() || s.Worker.IsBackup() {
		s.Lease.Prefilled(t)
	} else {
		s.Lease.FirstToken(t)
	}
}

// Answered records an answer that was not streamed, see [kvscore.Lease.Answered].
func (s *Seat) Answered(t time.Time, tokens int64) {
	if s.Worker.IsBackup() {
		s.Lease.Prefilled(t)
	} else {
		s.Lease.Answered(t, tokens)
	}
}

// Waiting returns how many requests wait in the queue.
func (p *Pool) Waiting() int { return int(p.queue.length.Load()) }

// WaitingInBackground returns how many of them are of background classes.
func (p *Pool) WaitingInBackground() int { return p.Waiting() - int(p.queue.others.Load()) }

// Tables keeps the table of the list of upstreams that the proxy offered last.
type Tables struct{ last atomic.Pointer[Table] }

// Offers returns the offers of a list of upstreams. repl fills in placeholders. Workers that
// are new become known to the pool.
func (k *Tables) Offers(p *Pool, list reverseproxy.UpstreamPool, repl *caddy.Replacer) Offers {
	t := k.last.Load()
	if t == nil || t.layout != p.layout.Load() || !t.isOf(list) {
		var lasting bool
		if t, lasting = p.tableOf(list, repl, p.Worker); lasting {
			k.last.Store(t)
		}
	}
	return Offers{list, t}
}
