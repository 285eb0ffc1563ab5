package pool

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
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

// Seat finds the request a worker and takes a place there. It gathers the candidates, lets
// the request choose, books the choice, and takes a slot. If all workers are full, the
// request waits in the queue, also while a source that follows its upstreams has none. Seat returns
// how long, and renews the offers if workers change. The error is one of those above, or the
// context's.
func (p *Pool) Seat(ctx context.Context, want *Wants, o *Offers, by Chooser, s *Seat) (waited time.Duration, err error) {
	var g grant // the slot that the queue has taken for the request
	giveBack := func() { p.queue.giveBack(&g) }
	defer giveBack()
	var at place
	if want.Kind != worker.KindOther {
		p.heed(want, time.Now())
	}
	wait := func(want *Wants, why string) error {
		by.Waits(why)
		renew := by.Renew
		if _, follows := renew(); !follows {
			renew = nil
		}
		most := want.Patience - waited
		if want.isPromised() {
			most = min(most, time.Until(want.Deadline))
		}
		v, d, err := p.queue.wait(ctx, want, o, at, most, renew)
		g = v
		waited += d
		return err
	}
	for waitedInVain := false; ; {
		*o = p.renewed(*o)
		c := p.Candidates(want, *o, &g, time.Now())
		found, full := len(c.Targets) > 0, len(c.Full) > 0
		var choice Choice
		var sat outcome
		if found {
			choice = by.Choose(ctx, c)
			if waitedInVain {
				choice.SessionWorker = nil
			}
			if choice.Wait == nil && choice.SessionWorker == nil {
				sat = p.sit(s, want, c, &choice, by, &g, &at)
			}
		}
		p.Return(c) // thousands of requests may wait
		switch {
		case sat == seated:
			return waited, nil
		case want.Over: // the backups were taken meanwhile
			giveBack()
			own := *want
			own.Over, own.Backups = false, nil
			want = &own
		case sat == spilled:
			over := *want
			over.Over = true
			want = &over
		case sat == crowded && (choice.Bound >= 0 || p.Settings.Load().OverflowAfter > 0): // it waits for its own workers
			giveBack()
			own := *want
			own.Backups = nil
			err = wait(&own, WaitsForRoom)
		case sat == tardy:
			giveBack() // it is charged to the class
			want, err = late(want, s.soonest, time.Now())
		case !found && g.worker != nil:
			giveBack() // its worker cannot be used any more
		case !found && !full:
			if err = awaitOffers(want, o, by, wait); err != nil {
				return waited, err
			}
		case choice.Wait != nil:
			err = choice.Wait(ctx)
		case choice.SessionWorker != nil:
			giveBack() // of another worker: all were full before
			own := *want
			own.Only = choice.SessionWorker
			if err = wait(&own, "the session's worker is full"); errors.Is(err, ErrWaited) && !want.isOverdue() {
				return waited, ErrWaitedForSession
			}
			waitedInVain = g.worker == nil
		case sat == taken && p.Waiting() == 0: // the worker has just filled up
		case sat == crowded:
			giveBack()
			err = wait(want, WaitsForRoom)
		default:
			giveBack()
			err = wait(want, WaitsForSlot)
		}
		if errors.Is(err, ErrWaited) && want.isOverdue() {
			want, err = late(want, 0, time.Now())
		}
		if err != nil {
			return waited, err
		}
	}
}

// awaitOffers has a request wait that is offered nothing, if its source follows its upstreams.
func awaitOffers(want *Wants, o *Offers, by Chooser, wait func(*Wants, string) error) error {
	if len(o.Ups) > 0 || want.Kind == worker.KindOther {
		return ErrNoWorker
	}
	now, follows := by.Renew()
	if !follows {
		return ErrNoWorker
	}
	if *o = now; len(now.Ups) > 0 {
		return nil
	}
	return wait(want, "there are no workers")
}

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

// outcome is the result of a choice.
type outcome uint8

const (
	unseated outcome = iota // nothing was chosen
	seated
	taken   // the worker filled up meanwhile, or a queued request has first claim to its slot
	crowded // no target has room, or the request leaves it to others
	tardy   // the first token would be late
	spilled // a backup serves it sooner
)

// sit books the choice and takes a slot, which may be the granted one. at is what the request would add
// there.
func (p *Pool) sit(s *Seat, want *Wants, c *Candidates, choice *Choice, by Chooser, g *grant, at *place) (sat outcome) {
	background := want.isBackground()
	backup := c.Workers[0].IsBackup()
	if c.Sel.Needs = kvscore.NoRoom; !c.Granted && !background && !backup {
		c.Sel.Needs = p.roomNeeded(want, c.At)
	}
	c.Sel.Quiet = background && !c.Granted
	if c.Sel.Quiet && (p.queue.others.Load() > 0 || !p.spares(want, c.offers, c.At)) {
		return crowded
	}
	if c.Sel.Within = 0; !backup {
		c.Sel.Within = p.within(want, c.At)
	}
	i, lease := p.Scheduler.Select(c.At, choice.Request, c.Targets, choice.Bound, choice.Policy, &c.Sel)
	terms := &c.Sel.Candidates[i]
	*at = place{max(0, c.Sel.Tokens-terms.OverlapTokens), terms.PrefillTime, c.Sel.Work(i)}
	late := !backup && p.predict(s, want, c, choice.Bound, i, lease != nil)
	spills := !backup && c.spare && !c.Granted && choice.Bound < 0 && (late || p.spills(want, c, lease != nil))
	if (late || spills) && lease != nil { // a policy has changed its candidates, or a backup is sooner
		lease.End(false, nil)
	}
	switch {
	case spills:
		return spilled
	case late:
		return tardy
	case lease == nil:
		return crowded
	}
	s.pool, s.Lease, s.left, s.bill = p, lease, false, bill{}
	defer func() {
		if sat != seated {
			s.Leave(false, nil) // also if something below panics
		}
	}()
	s.Worker, s.Target, s.Upstream, s.Begun, s.Kind = c.Workers[i], c.Targets[i].Target, c.Upstreams[i], c.At, want.Kind
	s.Terms, s.Tokens, s.Known = *terms, c.Sel.Tokens, c.Sel.Known
	s.Among, s.Unpriced = len(c.Targets), choice.Bound >= 0
	switch {
	case s.Worker == g.worker:
		p.queue.booked(g)
		s.slot, s.bill, *g = true, g.bill, grant{}
	case c.Granted: // another one, which is better for it
		if s.slot = s.Worker.TakeSlot(); !s.slot {
			return taken
		}
		s.bill, g.bill = g.bill, bill{}
		p.queue.giveBack(g)
	case want.Kind == worker.KindOther:
	case p.queue.takeUnclaimed(s.Worker, want, c.Sel.Needs > kvscore.NoRoom):
		s.slot = true
	case background:
		return crowded
	default:
		return taken
	}
	s.Ahead = s.Terms.PrefillTokens + s.Tokens
	s.Rank = s.Target.Rank
	if s.slot {
		p.queue.seat(&s.bill, want, at.work)
		p.kept.journal.Paid(lease.Journaled(), &journal.Payer{Class: want.class(), Tenant: want.Tenant, Weight: want.TenantWeight})
	}
	s.Enter(!want.NoTrial)
	by.Chosen(c, i, s.Unpriced)
	return seated
}

// spills returns whether a backup serves a request: its workers have no room, or their first token would
// come later than the operator allows.
func (p *Pool) spills(want *Wants, c *Candidates, hasRoom bool) bool {
	after := time.Duration(p.Settings.Load().OverflowAfter)
	if after == 0 {
		return !hasRoom && c.Sel.Needs < kvscore.Clear // the queue decides on a tenant's surplus
	}
	soonest := c.Sel.Soonest(-1)
	if !hasRoom {
		soonest += p.queue.ahead(want, 0)
	}
	return soonest > after.Seconds()*1e3
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
