package pool

import (
	"context"
	"errors"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Seat finds the request a worker and takes a place there. It gathers the candidates, lets
// the request choose, books the choice, and takes a slot. If all workers are full, the
// request waits in the queue, also while a source that follows its upstreams has none. Seat returns
// how long, and renews the offers if workers change. The error is one of those above, or the
// context's.
func (p *Pool) Seat(ctx context.Context, want *Wants, o *Offers, by Chooser, s *Seat) (waited time.Duration, err error) {
	r := seating{Pool: p, want: want, offers: o, by: by, seat: s}
	defer r.giveBack()
	if want.Kind != worker.KindOther {
		p.heed(want, time.Now())
	}
	for {
		choice, sat := r.choose(ctx)
		if sat == seated {
			return r.waited, nil
		}
		if err = r.await(ctx, &choice, sat); err != nil {
			return r.waited, err
		}
	}
}

// seating is a request's way to its seat.
type seating struct {
	*Pool
	want   *Wants // as they are now
	offers *Offers
	by     Chooser
	seat   *Seat

	granted grant // the slot that the queue has taken for the request
	at      place // what the request would add where it last chose
	waited  time.Duration
	inVain  bool // it has waited for its session's worker
}

func (r *seating) giveBack() { r.queue.giveBack(&r.granted) }

// outcome is the result of a choice.
type outcome uint8

const (
	absent  outcome = iota // no worker can serve the request
	full                   // those that can are full
	lost                   // the worker whose slot the queue granted cannot be used any more
	unready                // the request must wait for something else first
	bound                  // the request waits for its session's worker
	seated
	taken   // the worker filled up meanwhile, or a queued request has first claim to its slot
	crowded // no target has room, or the request leaves it to others
	tardy   // the first token would be late
	spilled // a backup serves it sooner
)

// choose gathers the candidates, lets the request choose, and takes a place there.
func (r *seating) choose(ctx context.Context) (choice Choice, sat outcome) {
	*r.offers = r.renewed(*r.offers)
	c := r.Candidates(r.want, *r.offers, &r.granted, time.Now())
	switch {
	case len(c.Targets) > 0:
		choice = r.by.Choose(ctx, c)
		switch {
		case choice.Wait != nil:
			sat = unready
		case choice.SessionWorker != nil && !r.inVain:
			sat = bound
		default:
			sat = r.sit(c, &choice)
		}
	case r.granted.worker != nil:
		sat = lost
	case len(c.Full) > 0:
		sat = full
	}
	r.Return(c) // thousands of requests may wait
	return choice, sat
}

// await waits until the request may choose again.
func (r *seating) await(ctx context.Context, choice *Choice, sat outcome) (err error) {
	switch {
	case r.want.Over: // the backups were taken meanwhile
		r.giveBack()
		own := *r.want
		own.Over, own.Backups = false, nil
		r.want = &own
	case sat == spilled:
		over := *r.want
		over.Over = true
		r.want = &over
	case sat == tardy:
		r.giveBack() // it is charged to the class
		r.want, err = late(r.want, r.seat.soonest, time.Now())
	case sat == lost:
		r.giveBack()
	case sat == absent:
		return r.awaitOffers(ctx)
	case sat == unready:
		return choice.Wait(ctx)
	case sat == bound:
		return r.awaitSession(ctx, choice.SessionWorker)
	case sat == crowded:
		return r.awaitRoom(ctx, choice)
	case sat == taken && r.Waiting() == 0: // the worker has just filled up
	default:
		return r.awaitTurn(ctx, r.want, WaitsForSlot)
	}
	return err
}

// awaitOffers waits for workers, if the source follows its upstreams.
func (r *seating) awaitOffers(ctx context.Context) error {
	if len(r.offers.Ups) > 0 || r.want.Kind == worker.KindOther {
		return ErrNoWorker
	}
	now, follows := r.by.Renew()
	if !follows {
		return ErrNoWorker
	}
	if *r.offers = now; len(now.Ups) > 0 {
		return nil
	}
	return r.wait(ctx, r.want, "there are no workers")
}

// awaitSession waits for a slot of the session's worker.
func (r *seating) awaitSession(ctx context.Context, w *worker.Worker) error {
	own := *r.want
	own.Only = w
	err := r.awaitTurn(ctx, &own, "the session's worker is full")
	if errors.Is(err, ErrWaited) {
		return ErrWaitedForSession
	}
	r.inVain = r.granted.worker == nil
	return err
}

// awaitRoom waits until a worker has room. A request that is bound to a target, or that might have
// overflowed, waits for its own workers.
func (r *seating) awaitRoom(ctx context.Context, choice *Choice) error {
	if choice.Bound < 0 && r.Settings.Load().OverflowAfter == 0 {
		return r.awaitTurn(ctx, r.want, WaitsForRoom)
	}
	own := *r.want
	own.Backups = nil
	return r.awaitTurn(ctx, &own, WaitsForRoom)
}

// awaitTurn waits in the queue. A request that waits until it is late may go on in another class.
func (r *seating) awaitTurn(ctx context.Context, want *Wants, why string) error {
	err := r.wait(ctx, want, why)
	if errors.Is(err, ErrWaited) && r.want.isOverdue() {
		r.want, err = late(r.want, 0, time.Now())
	}
	return err
}

// wait waits in the queue, which then has all slots that it granted before.
func (r *seating) wait(ctx context.Context, want *Wants, why string) error {
	r.giveBack()
	r.by.Waits(why)
	renew := r.by.Renew
	if _, follows := renew(); !follows {
		renew = nil
	}
	most := want.Patience - r.waited
	if want.isPromised() {
		most = min(most, time.Until(want.Deadline))
	}
	g, waited, err := r.queue.wait(ctx, want, r.offers, r.at, most, renew)
	r.granted = g
	r.waited += waited
	return err
}

// sit books the choice and takes a slot, which may be the granted one.
func (r *seating) sit(c *Candidates, choice *Choice) (sat outcome) {
	i, lease, sat := r.book(c, choice)
	if lease == nil {
		return sat
	}
	s, want := r.seat, r.want
	s.pool, s.Lease, s.left, s.bill = r.Pool, lease, false, bill{}
	defer func() {
		if sat != seated {
			s.Leave(false, nil) // also if something below panics
		}
	}()
	s.Worker, s.Target, s.Upstream, s.Begun, s.Kind = c.Workers[i], c.Targets[i].Target, c.Upstreams[i], c.At, want.Kind
	s.Terms, s.Tokens, s.Known = c.Sel.Candidates[i], c.Sel.Tokens, c.Sel.Known
	s.Among, s.Unpriced = len(c.Targets), choice.Bound >= 0
	if refused := r.takeSlot(c); refused != seated {
		return refused
	}
	s.Ahead = s.Terms.PrefillTokens + s.Tokens
	s.Rank = s.Target.Rank
	if s.slot {
		r.queue.seat(&s.bill, want, r.at.work)
		r.kept.journal.Paid(lease.Journaled(), &journal.Payer{Class: want.class(), Tenant: want.Tenant, Weight: want.TenantWeight})
	}
	s.Enter(!want.NoTrial)
	r.by.Chosen(c, i, s.Unpriced)
	return seated
}

// book has a policy choose, and books the choice. Without a lease, sat says why.
func (r *seating) book(c *Candidates, choice *Choice) (i int, lease *kvscore.Lease, sat outcome) {
	want, backup, background := r.want, c.Workers[0].IsBackup(), r.want.isBackground()
	if c.Sel.Needs = kvscore.NoRoom; !c.Granted && !background && !backup {
		c.Sel.Needs = r.roomNeeded(want, c.At)
	}
	c.Sel.Quiet = background && !c.Granted
	if c.Sel.Quiet && (r.queue.others.Load() > 0 || !r.spares(want, c.offers, c.At)) {
		return 0, nil, crowded
	}
	if c.Sel.Within = 0; !backup {
		c.Sel.Within = r.within(want, c.At)
	}
	i, lease = r.Scheduler.Select(c.At, choice.Request, c.Targets, choice.Bound, choice.Policy, &c.Sel)
	terms := &c.Sel.Candidates[i]
	r.at = place{max(0, c.Sel.Tokens-terms.OverlapTokens), terms.PrefillTime, c.Sel.Work(i)}
	late := !backup && r.predict(r.seat, want, c, choice.Bound, i, lease != nil)
	spills := !backup && c.spare && !c.Granted && choice.Bound < 0 && (late || r.spills(want, c, lease != nil))
	if (late || spills) && lease != nil { // a policy has changed its candidates, or a backup is sooner
		lease.End(false, nil)
	}
	switch {
	case spills:
		return i, nil, spilled
	case late:
		return i, nil, tardy
	}
	return i, lease, crowded
}

// takeSlot takes a slot of the chosen worker. It returns seated if the request has one, or needs none.
func (r *seating) takeSlot(c *Candidates) outcome {
	s, g := r.seat, &r.granted
	switch {
	case s.Worker == g.worker:
		r.queue.booked(g)
		s.slot, s.bill, *g = true, g.bill, grant{}
	case c.Granted: // another one, which is better for it
		if s.slot = s.Worker.TakeSlot(); !s.slot {
			return taken
		}
		s.bill, g.bill = g.bill, bill{}
		r.giveBack()
	case r.want.Kind == worker.KindOther:
	case r.queue.takeUnclaimed(s.Worker, r.want, c.Sel.Needs > kvscore.NoRoom):
		s.slot = true
	case r.want.isBackground():
		return crowded
	default:
		return taken
	}
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
