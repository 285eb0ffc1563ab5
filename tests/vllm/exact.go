//go:build unix

package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/exactness"
)

// exactBlocks is the default of -blocks with -exact. The conversations need about twice as
// many as two engines have.
const exactBlocks = 601

// The phases of a run with -exact.
const (
	phaseFresh = "fresh"       // the caches have room for all
	phaseEvict = "evictions"   // they do not
	phaseReset = "reset"       // one engine has forgotten its cache
	phaseDown  = "engine down" // one engine ends and starts again
	phaseBack  = "engine back" // it serves again
)

const (
	longest   = 4000 // tokens of a conversation that goes on
	settle    = time.Second
	perPhase  = 20               // conversations that a phase begins
	kept      = 16               // conversations for which the caches have room
	toBeExact = 10 * time.Second // for the streams, after a start or the end of a phase
)

// runExact holds conversations through evictions, a reset and a restart, prints what the
// router predicted, and returns an error if a check failed.
func (o *options) runExact(ctx context.Context, c *servers) error {
	r := &report{
		Load: &exactness.Load{
			Router: c.router, Model: model, Adapter: adapter, Salts: true, Clients: o.clients, MayFail: phaseDown,
			Rand: rand.New(rand.NewPCG(o.seed, 7)), //nolint:gosec // not a secret
		},
		o: o, router: &exactness.Router{Admin: c.admin, Engines: c.engines},
	}
	for _, phase := range []func(context.Context, *servers) error{r.fresh, r.evict, r.reset, r.endAndStart} {
		if err := phase(ctx, c); err != nil {
			r.print(os.Stdout)
			return errors.Join(err, save(o.out, r.Samples))
		}
	}
	r.print(os.Stdout)
	return errors.Join(r.check(os.Stdout), save(o.out, r.Samples))
}

// fresh begins conversations that fit into the caches.
func (r *report) fresh(ctx context.Context, c *servers) error {
	if err := r.look(ctx, "start"); err != nil {
		return err
	}
	if err := r.Hold(ctx, phaseFresh, r.Open(perPhase), 3); err != nil {
		return err
	}
	return r.look(ctx, phaseFresh)
}

// evict begins more, and continues the first ones now and then.
func (r *report) evict(ctx context.Context, c *servers) error {
	before := r.Talks
	for range 3 {
		if err := r.Hold(ctx, phaseEvict, r.Open(perPhase/2), 2); err != nil {
			return err
		}
		if err := r.Hold(ctx, phaseEvict, exactness.Shorter(before, longest), 1); err != nil {
			return err
		}
	}
	return r.look(ctx, phaseEvict)
}

// reset makes one engine forget its cache between two turns of conversations.
func (r *report) reset(ctx context.Context, c *servers) error {
	talks := r.Open(kept)
	if err := r.Hold(ctx, phaseEvict, talks, 2); err != nil {
		return err
	}
	if err := c.resetCache(ctx, 0); err != nil { // of all its ranks
		return err
	}
	first := len(r.Samples)
	if err := r.Hold(ctx, phaseReset, talks, 3); err != nil {
		return err
	}
	r.at.reset, r.at.resetOver = make(map[exactness.Target]time.Time), time.Now()
	for i := range r.Samples[first:] { // in the order of their ends
		s := &r.Samples[first+i]
		if at, seen := r.at.reset[s.At]; s.At.Worker == r.ids[0] && (!seen || s.Begun.Before(at)) {
			r.at.reset[s.At] = s.Begun
		}
	}
	return r.look(ctx, phaseReset)
}

// endAndStart ends the last engine and starts it again. Half of the conversations go on
// meanwhile if there is another one.
func (r *report) endAndStart(ctx context.Context, c *servers) error {
	awake, asleep := r.Open(kept/2), r.Open(kept/2)
	if err := r.Hold(ctx, phaseEvict, slices.Concat(awake, asleep), 2); err != nil {
		return err
	}
	serves := make(chan error, 1)
	go func() {
		c.stopEngine(len(c.engines) - 1)
		err := c.startEngine(ctx, r.o, len(c.engines)-1)
		if r.at.back = time.Now(); err == nil {
			r.at.exactAfter, r.restart = r.router.Await(ctx, time.Minute, r.isExact)
		}
		serves <- err
	}()
	for over := false; !over; {
		if len(c.engines) > 1 {
			if awake = exactness.Shorter(awake, longest); len(awake) < kept/2 {
				awake = append(awake, r.Open(4)...)
			}
			if err := r.Hold(ctx, phaseDown, awake, 1); err != nil {
				return err
			}
		}
		select {
		case err := <-serves:
			if err != nil {
				return err
			}
			over = true
		case <-time.After(5 * time.Second):
		}
	}
	for range 2 {
		if err := r.Hold(ctx, phaseBack, slices.Concat(asleep, r.Open(kept/2)), 2); err != nil {
			return err
		}
	}
	return r.look(ctx, phaseBack)
}
