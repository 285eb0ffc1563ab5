package dispatch

import (
	"context"
	"errors"
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// mostAttempts is how many workers are asked for the rest of a stream.
const mostAttempts = 3

// remainder is the rest of a stream, which other workers are asked for.
type remainder struct {
	*delivery
	rest    *api.Rest
	failed  []*worker.Worker // that cannot give it, or have not
	apart   *worker.Worker   // other hosts than that of this worker are better; nil if any host is as good
	left    int              // attempts that may follow
	exact   bool             // the latest one asks for it by the ids of tokens
	refused bool             // an engine cannot go on with the ids of the answer's tokens

	blameless bool // the latest attempt failed by no fault of its worker
}

// seat finds a seat for the next attempt.
func (r *remainder) seat(ctx context.Context, d *Dispatch) error {
	if err := d.seatApart(ctx, r.apart, r.failed); err != nil {
		return err
	}
	a := d.attempt
	r.failed = append(r.failed, a.Worker)
	d.tried = []*worker.Worker{a.Worker} // the stream may come back to the others later
	r.left--
	r.exact = r.rest.Way == api.WayExact
	resume.CountTokens(ctx, r.rest, attempt.ModelAt(d.plan, a.Worker), a.Worker, func(ctx context.Context, most int64) engine.Post {
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
	last := r.refused || r.left == 0 || v.suspect && r.d.lastSuspect()
	if ctx.Err() == nil && !last && r.d.affordable(err) {
		v.do = retry
	}
	return v
}
