//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/exactness"
)

// report is what a run with -exact prints.
type report struct {
	*exactness.Load
	o       *options
	router  *exactness.Router
	ids     []uint64 // of the workers, in the order of the engines
	at      moments
	looks   []exactness.Look
	restart error // why the streams were not exact again after the restart
}

// moments are when something happened from which the router has a second to learn.
type moments struct {
	reset      map[exactness.Target]time.Time // the first request to each rank of the engine after its reset
	resetOver  time.Time                      // the last one
	back       time.Time                      // the engine serves again
	exactAfter time.Duration
}

// isExact returns whether the router knows all that a worker's engine holds.
func (r *report) isExact(w *exactness.Worker) bool { return w.IsExact(r.o.ranks) }

// look waits until the router knows all that the engines hold, and notes what it says.
func (r *report) look(ctx context.Context, phase string) error {
	if _, err := r.router.Await(ctx, toBeExact, r.isExact); err != nil {
		return fmt.Errorf("after %s: %w", phase, err)
	}
	list, err := r.router.Workers(ctx)
	if err != nil {
		return err
	}
	r.looks, r.ids = append(r.looks, exactness.Look{Phase: phase, Workers: list}), r.ids[:0]
	for i := range list {
		r.ids = append(r.ids, list[i].ID)
	}
	fmt.Fprintf(os.Stderr, "after %s: %d requests\n", phase, len(r.Samples))
	return nil
}

// print writes the tables.
func (r *report) print(w io.Writer) {
	_ = r.Print(w, r.o.block, phaseFresh, phaseEvict, phaseReset, phaseDown, phaseBack)
	_ = exactness.PrintStreams(w, r.looks)
}

// check prints whether the router did what it must, and returns an error if not.
func (r *report) check(w io.Writer) error {
	c := exactness.Checks{W: w}
	r.checkPredictions(&c)
	r.checkStreams(&c)
	if c.Failed {
		return errors.New("a check failed")
	}
	return nil
}

func (r *report) checkPredictions(c *exactness.Checks) {
	var all, fresh, kept exactness.Figures
	for i := range r.Samples {
		s := &r.Samples[i]
		all.Add(s, r.o.block)
		if s.Phase == phaseFresh {
			fresh.Add(s, r.o.block)
		}
		if s.Phase == phaseReset && s.Before.Worker == r.ids[len(r.ids)-1] {
			kept.Add(s, r.o.block)
		}
	}
	may := 0.0 // leave an engine because it is busy
	if r.o.clients > 1 {
		may = 0.05
	}
	stay := func(f exactness.Figures) bool { return float64(f.Moved) <= may*float64(f.Later) }
	c.Check(stay(fresh), "%d of %d later turns left the engine and rank that hold the conversation", fresh.Moved, fresh.Later)
	if len(r.ids) > 1 {
		c.Check(stay(kept), "%d of %d turns left the engine that keeps its cache when the other one is reset", kept.Moved, kept.Later)
	}
	reset, late := r.wrong(func(s *exactness.Sample) time.Time { return r.at.reset[s.At] }, r.at.resetOver)
	c.Check(late == 0, "after the reset: %d wrong predictions for that engine in the first second, %d later", reset, late)
	back, late := r.wrong(func(s *exactness.Sample) time.Time {
		if s.At.Worker != r.ids[len(r.ids)-1] {
			return time.Time{}
		}
		return r.at.back
	}, time.Now())
	c.Check(late == 0, "after the restart: %d wrong predictions for that engine in the first second, %d later", back, late)
	n := all.Requests - reset - back
	c.Check(100*all.Within >= 99*n, "%d of %d predictions are right to one block, besides these %d of the first seconds", all.Within, n, reset+back)
}

// wrong counts the requests with a prediction that is wrong by more than one block. It looks at
// those between since and to; a zero since leaves a request out. early counts those of the first
// second, late the others.
func (r *report) wrong(since func(*exactness.Sample) time.Time, to time.Time) (early, late int) {
	for i := range r.Samples {
		s := &r.Samples[i]
		off, from := s.Off(), since(s)
		switch {
		case from.IsZero() || s.Begun.Before(from) || s.Begun.After(to) || max(off, -off) <= r.o.block:
		case s.Begun.Sub(from) <= settle:
			early++
		default:
			late++
		}
	}
	return early, late
}

func (r *report) checkStreams(c *exactness.Checks) {
	c.Check(r.restart == nil, "the streams are live and exact %v after the engine serves again", r.at.exactAfter.Round(time.Millisecond))
	var gaps, removed, cleared, skipped uint64
	for i := range r.looks[len(r.looks)-1].Workers {
		for _, e := range r.looks[len(r.looks)-1].Workers[i].Events {
			gaps, removed, cleared = gaps+e.Gaps, removed+e.Removed, cleared+e.Cleared
			for _, n := range e.Skipped {
				skipped += n
			}
		}
	}
	c.Check(gaps == 0 && skipped == 0, "%d gaps in the streams, %d events not used", gaps, skipped)
	var most int64
	for _, l := range r.looks {
		for i := range l.Workers {
			for _, e := range l.Workers[i].Events {
				most = max(most, e.Held["device"])
			}
		}
	}
	room := int64(r.o.blocks - 1) // vLLM keeps one
	c.Check(most > room*9/10 && most <= room, "the router has seen up to %d blocks in a cache of %d", most, room)
	c.Check(removed > 0 && cleared > 0, "the engines evicted %d blocks and cleared their caches %d times", removed, cleared)
}
