//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/exactness"
)

const (
	atOnce   = 20                      // conversations that a phase begins
	patience = 20 * time.Second        // for what must come
	batch    = 1500 * time.Millisecond // longer than the simulator keeps events back
)

// run are conversations before the router.
type run struct {
	*exactness.Load
	s      *servers
	router *exactness.Router
	looks  []exactness.Look
}

// serves returns whether a worker gets requests, and the router its events.
func serves(w *exactness.Worker) bool {
	until := w.Health.MarkedDownUntil
	return len(w.Events) == 1 && w.Events[0].Connected && (until == nil || until.Before(time.Now()))
}

func (r *run) all(ctx context.Context) error {
	if _, err := r.router.Await(ctx, patience, serves); err != nil {
		return err
	}
	talks := r.Open(atOnce)
	if err := r.Hold(ctx, phaseFresh, talks, 4); err != nil {
		return err
	}
	if err := r.look(ctx, phaseFresh); err != nil {
		return err
	}
	if err := r.downAndBack(ctx, talks); err != nil {
		return err
	}
	// These conversations do not fit. The simulator evicts any block of a prompt, and its events
	// come up to a second late.
	for range 4 {
		if err := r.Hold(ctx, phaseFull, r.Open(4*atOnce), 3); err != nil {
			return err
		}
	}
	return r.look(ctx, phaseFull)
}

// downAndBack ends one engine and starts it again. Half of the conversations go on meanwhile.
func (r *run) downAndBack(ctx context.Context, talks []*exactness.Talk) error {
	r.s.end(1)
	if err := r.Hold(ctx, phaseDown, talks[:len(talks)/2], 2); err != nil {
		return err
	}
	if err := r.s.begin(ctx, 1); err != nil {
		return err
	}
	if _, err := r.router.Await(ctx, patience, serves); err != nil {
		return err
	}
	if err := r.Hold(ctx, phaseBack, slices.Concat(talks, r.Open(atOnce)), 2); err != nil {
		return err
	}
	return r.look(ctx, phaseBack)
}

// look notes what the router says when the engines have published all.
func (r *run) look(ctx context.Context, phase string) error {
	select {
	case <-time.After(batch):
	case <-ctx.Done():
		return ctx.Err()
	}
	list, err := r.router.Workers(ctx)
	r.looks = append(r.looks, exactness.Look{Phase: phase, Workers: list})
	return err
}

// check prints whether the router did what it must, and returns an error if not.
func (r *run) check(w io.Writer) error {
	c := exactness.Checks{W: w}
	by := make(map[string]*exactness.Figures)
	for i := range r.Samples {
		s := &r.Samples[i]
		if by[s.Phase] == nil {
			by[s.Phase] = new(exactness.Figures)
		}
		by[s.Phase].Add(s, blockSize)
	}
	for _, phase := range []string{phaseFresh, phaseDown, phaseBack} {
		f := by[phase]
		c.Check(100*f.Within >= 99*f.Requests, "%s: %d of %d predictions are right to one block", phase, f.Within, f.Requests)
	}
	f := by[phaseFresh]
	c.Check(f.Moved == 0, "%d of %d later turns left the engine that holds the conversation", f.Moved, f.Later)
	for _, l := range r.looks {
		if l.Phase == phaseFull {
			continue
		}
		for i := range l.Workers {
			e := &l.Workers[i].Events[0]
			c.Check(e.Connected && e.Gaps == 0 && e.Stored > 0 && e.Held["device"] > 0 && len(e.Skipped) == 0,
				"after %s, engine %d: %s, %s, %d blocks stored, %d held, %d gaps, not used: %v",
				l.Phase, i, e.State, e.Knowledge, e.Stored, e.Held["device"], e.Gaps, e.Skipped)
		}
	}
	fmt.Fprintln(w)
	if c.Failed {
		return errors.New("a check failed")
	}
	return nil
}
