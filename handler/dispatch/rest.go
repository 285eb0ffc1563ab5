package dispatch

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"go.uber.org/zap"
)

// mostAttempts is how many workers are asked for the rest of a stream.
const mostAttempts = 3

// remainder is the rest of a stream, which other workers are asked for.
type remainder struct {
	*delivery
	rest    *api.Rest
	failed  []*pool.Worker // that cannot give it, or have not
	apart   *pool.Worker   // other hosts than that of this worker are better; nil if any host is as good
	left    int            // attempts that may follow
	exact   bool           // the latest one asks for it by the ids of tokens
	refused bool           // an engine cannot go on with the ids of the answer's tokens

	blameless bool // the latest attempt failed by no fault of its worker
}

// goOn asks other workers for the rest until one gives it, or returns the reason why none does.
// drained: the worker so far is well, and so is its host.
// old is the worker so far, nil if it may serve the rest.
func (o *delivery) goOn(ctx context.Context, rest *api.Rest, old *pool.Worker, drained bool) (*response.Rest, string) {
	d := o.d
	r := &remainder{delivery: o, rest: rest, left: mostAttempts}
	if !drained {
		r.apart = o.attempt.Worker
	}
	var reason string
	if r.failed, reason = resume.Without(d.offers, old, d.plan.API.Name(), rest.Way); reason != "" {
		return nil, reason
	}
	d.Rest = rest
	resp, err := d.run(ctx, r)
	switch {
	case err == nil:
		o.arrive(ctx, d.attempt, drained)
		return &response.Rest{From: resp.Body, Ctx: d.attempt.Context(), Joint: rest.Joint}, ""
	case r.refused:
		reason = resume.NotExact
	default:
		reason = resume.StaysNoWorker
	}
	if a := d.attempt; a != o.attempt {
		outcome := pool.AttemptRetried
		if ctx.Err() != nil {
			outcome = outcomeClientGone
		}
		a.End(outcome, !r.blameless)
	}
	return nil, reason
}

// seat finds a seat for the next attempt.
func (r *remainder) seat(ctx context.Context, d *Dispatch) error {
	if err := d.seatApart(ctx, r.apart, r.failed); err != nil {
		return err
	}
	a := d.attempt
	r.failed = append(r.failed, a.Worker)
	d.tried = []*pool.Worker{a.Worker} // the stream may come back to the others later
	r.left--
	r.exact = r.rest.Way == api.WayExact
	resume.CountTokens(ctx, r.rest, d.plan.Model, a.Worker, func(ctx context.Context, most int64) engine.Post {
		return d.AskTokenizer(ctx, d.plan, a.Worker, most)
	})
	return nil
}

// judge decides what follows from an attempt at the rest. Only a stream can go on.
func (r *remainder) judge(ctx context.Context, a *attempt.Attempt, resp *http.Response, err error) verdict {
	v := r.d.judge(ctx, resp, false, err)
	v.do, v.reason, v.misfit = fail, "", fits
	if err == nil && a.Streams(resp) && !body.Compressed(resp.Header) {
		v.do = deliver
		return v
	}
	refuses := err == nil && !attempt.Retryable(resp.StatusCode)
	if refuses { // it may be the rest's fault
		v.outcome = a.Shows(pool.OutcomeAnswered, "")
	}
	if resp != nil {
		_ = resp.Body.Close()
	}
	r.blameless = v.outcome.Kind <= pool.OutcomeGood
	v.blameless = r.blameless
	r.refused = r.exact && (refuses || errors.Is(err, resume.ErrExact))
	if ctx.Err() == nil && !r.refused && r.left > 0 && !(v.suspect && r.d.lastSuspect()) && r.d.affordable(err) {
		v.do = retry
	}
	return v
}

// seatApart finds a seat on none of the failed workers, if possible on another host than that of old.
func (d *Dispatch) seatApart(ctx context.Context, old *pool.Worker, failed []*pool.Worker) error {
	d.tried = slices.Clone(failed)
	if old != nil {
		host := old.Host()
		for i := range d.offers.Table.Rows {
			if w := d.offers.Table.Rows[i].Worker; w.Host() == host {
				d.tried = append(d.tried, w)
			}
		}
		want := d.Wants()
		for _, v := range d.Pool.Judge(&want, d.offers, time.Now()) {
			if v != pool.Fits {
				continue
			}
			if err := d.seat(ctx); !errors.Is(err, pool.ErrNoWorker) {
				return err
			}
			break
		}
		d.tried = slices.Clone(failed)
	}
	return d.seat(ctx)
}

// arrive records that the stream goes on with an attempt.
func (o *delivery) arrive(ctx context.Context, a *attempt.Attempt, drained bool) {
	d := o.d
	o.attempt, o.phases, o.told = a, d.phases, false
	o.moved++
	o.before, o.waits, o.alive = o.tokens, false, time.Time{}
	state := d.turn.Commit(ctx, a.Target, true)
	if state == turn.Moved {
		why := movedFailed
		switch {
		case d.beyond > 0:
			why = movedContext
		case drained:
			why = movedUnavailable
		}
		d.Metrics.moves.WithLabelValues(d.Pool.Name, why).Inc()
	}
	if d.beyond == 0 {
		d.Pool.Incidents.Raise(time.Now(), "streams break off, and go on at other workers", d.Pool.Logger)
	}
	if c := d.Logger.Check(zap.DebugLevel, "stream goes on at another worker"); c != nil {
		c.Write(zap.String("upstream", a.Worker.Dial), zap.Int("moves", o.moved))
	}
}
