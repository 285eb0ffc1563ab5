package sim

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Routers says how many routers share the requests out, by chance.
type Routers struct {
	// Number is the number of routers; 0 stands for 1.
	Number int
	// Share says that they tell each other what they do.
	Share bool
	// Late is how long that takes.
	Late time.Duration
}

// router is one of the routers in front of the engines.
type router struct {
	scheduler *kvscore.Scheduler
	refs      []kvscore.TargetRef
	selection kvscore.Selection
	dry       kvscore.Selection // of choices that are not made
	policy    kvscore.Policy
	sessions  *sessions // nil without
	queue     line

	journal  journal.Journal
	outlet   *journal.Outlet
	encoder  journal.Encoder
	follower journal.Follower
	told     uint64 // entries
}

// telling is what one router told, on its way to the others.
type telling struct {
	from *router
	sent journal.Sent
}

// buildRouters makes the routers. They know the engines.
func (r *replay) buildRouters() error {
	for i := range max(1, r.Routers.Number) {
		one := &router{scheduler: kvscore.NewScheduler(kvscore.Settings{}), policy: r.spec.make(&r.view)}
		one.dry.Rand = rand.New(rand.NewPCG(r.Seed+2, uint64(i)))     //nolint:gosec // to be repeated
		one.selection.Rand = rand.New(rand.NewPCG(r.Seed, uint64(i))) //nolint:gosec // to be repeated
		if f := cmp.Or(r.Wrong, 1); f != 1 {
			one.policy = wrong{one.policy, f}
		}
		one.journal.Clock = r.clock
		if r.Sessions {
			var err error
			if one.sessions, err = newSessions(&one.journal); err != nil {
				return fmt.Errorf("opening the session store: %w", err)
			}
		}
		r.routers = append(r.routers, one)
		if r.Share {
			one.share(r)
			one.scheduler.SetRouters(i, r.Routers.Number)
		}
	}
	return nil
}

// share opens the router's journal, and follows those of the others.
func (o *router) share(r *replay) {
	o.outlet = o.journal.Open(true)
	o.scheduler.SetJournal(&o.journal)
	o.encoder.StartEpoch(r.clock(), new(journal.Head))
	o.follower = journal.Follower{
		Scheduler: o.scheduler, Limits: new(quota.Book), Refuse: func(*journal.Head) error { return nil },
		Other: func(*journal.Record, uint64) {}, Joined: func(*journal.Peer) {},
		Worker: func(dial string) (id uint64, ok bool) {
			_, err := fmt.Sscan(dial, &id)
			return id, err == nil
		},
	}
	if o.sessions != nil {
		o.follower.Sessions = o.sessions.store
	}
}

// tell sends what the routers have done to the others.
func (r *replay) tell() {
	if !r.Share {
		return
	}
	for i, o := range r.routers {
		o.outlet.Write(&o.encoder, func(id uint64) string { return fmt.Sprint(id) })
		if entry := o.encoder.Entry(); entry != nil {
			o.told++
			sent := journal.Sent{Router: uint64(i), Number: o.told, Entries: append([]byte(nil), entry...)} //nolint:gosec // not negative
			r.events.push(event{at: r.now + r.Late, n: r.tellings, tell: &telling{o, sent}})
			r.tellings++
		}
	}
}

// hear has all routers but one apply what that one told.
func (r *replay) hear(t *telling) {
	for _, o := range r.routers {
		if o != t.from {
			o.follower.Take(r.clock(), &t.sent, false)
			r.dispatch(o)
		}
	}
}

// route returns the router of a request.
func (r *replay) route(n int) *router {
	if len(r.routers) == 1 {
		return r.routers[0]
	}
	return r.routers[rand.New(rand.NewPCG(r.Seed+1, uint64(n))).IntN(len(r.routers))] //nolint:gosec // to be repeated
}
