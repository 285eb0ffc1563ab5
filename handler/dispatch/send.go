package dispatch

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// send sends the request to the attempt's worker. resent: net/http sent it twice.
func (d *Dispatch) send(req *http.Request) (resp *http.Response, resent bool, err error) {
	a := d.attempt
	if err = d.turn.Open(req, a.Worker, a.Target); err != nil {
		return nil, false, err
	}
	if a.Terms.Split {
		if d.phases, err = d.split.Begin(d, a, req); errors.Is(err, pool.ErrQueueFull) || errors.Is(err, pool.ErrWaited) {
			d.turnAway(err)
			err = d.wait.turnedAway
		}
		if err != nil {
			return nil, false, err
		}
	}
	if a.Answers != nil {
		a.Waits(false)
		return d.phases.Answer(req), false, nil
	}
	d.Session, d.AskIDs = d.turn.EngineSession(), d.exact && (d.Rest == nil && d.goesOn() || d.cutIDs)
	b := d.bounds()
	resp, resent, err = a.Header(req, &b)
	d.noticeDone()
	if d.phases != nil {
		d.phases.Sent(d.Sent)
		if err == nil && !a.Streams(resp) {
			d.phases.Arrived(resp.StatusCode)
		}
	}
	return resp, resent, err
}

// bounds returns what may end the attempt early.
func (d *Dispatch) bounds() (b attempt.Bounds) {
	a := d.attempt
	if t := d.Timeouts; a.Kind == worker.KindStream {
		b.First, b.Idle = time.Duration(t.FirstToken), time.Duration(t.StreamIdle)
	}
	unsafe := d.phases.CancelUnsafe()
	b.Movable = d.movable() && !unsafe
	b.Moves = d.goesOn() && (d.answer == nil || d.answer.moved+1 < d.Resume.Tries) && !unsafe
	b.Ends = a.Kind == worker.KindStream && len(d.offers.Ups) > 1
	if d.phases != nil {
		d.phases.Bound(&b)
	}
	return b
}

// movable returns whether another worker may take over the attempt. It asks before the attempt
// ends, and cannot know whether another worker will be free then.
func (d *Dispatch) movable() bool {
	return d.plan.Request != nil && d.repeatable(true) && !d.pinned() && len(d.offers.Ups) > 1 && !d.lastSuspect() &&
		(!d.Limits.Set() || d.anotherRound())
}

// noticeDone records what was done to the body of the last attempt for its engine.
func (d *Dispatch) noticeDone() {
	d.cutIDs = d.cutIDs || d.CutIDs
	cut := d.Cut &^ (d.cut | d.plan.Dropped) // counted once per request
	d.cut |= cut
	d.CountDropped(cut, nil)
	if d.Unsupported == 0 || !d.plan.TakesSlot {
		return
	}
	for name := range d.Unsupported.Names {
		d.Metrics.unsupported.WithLabelValues(d.Pool.Name, cmp.Or(d.Engine, engine.Other), name).Inc()
	}
	d.Pool.Raise(time.Now(), "clients request nvext fields that the engine does not support")
}

// SeatPrefill implements split.Owner.
func (d *Dispatch) SeatPrefill(ctx context.Context, want *pool.Wants, by pool.Chooser, p *attempt.Attempt) error {
	offers := d.offers
	if err := d.reserve(ctx, want, &offers, by, p); err != nil {
		return err
	}
	d.begin(p, d.reasonOf(false, &p.Terms))
	return nil
}

// Prefilled implements split.Owner.
func (d *Dispatch) Prefilled(p *attempt.Attempt, c response.Counts) {
	o := &delivery{d: d, attempt: p}
	o.Counts = c
	kind := worker.ReportKind{API: d.plan.API.Name()}
	o.learnPrompt(p.Worker.CachedTokens(kind, c.Cached))
}

// PhaseEnded implements split.Owner.
func (d *Dispatch) PhaseEnded(name string, err error, took time.Duration) {
	outcome := phaseOK
	switch {
	case errors.Is(err, context.Canceled):
		outcome = phaseCanceled
	case err != nil:
		outcome = phaseFailed
	default:
		d.PoolMetrics.phaseTimes[name].Observe(took.Seconds())
	}
	d.PoolMetrics.phases[[2]string{name, outcome}].Inc()
}

// MayRetry implements split.Owner.
func (d *Dispatch) MayRetry() bool { return d.mayGoOnTrying() && d.Pool.Budget.MayRetry(time.Now()) }
