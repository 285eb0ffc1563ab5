package dispatch

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"go.uber.org/zap"
)

// continues returns whether a worker's engine can go on with an answer to the request.
func (o *delivery) continues(w *pool.Worker) bool {
	e := w.Engine()
	return e.Continues(o.d.plan.API.Name())
}

// returnsIDs returns whether a worker's engine can go on with an answer's ids.
func (o *delivery) returnsIDs(w *pool.Worker) bool {
	e := w.Engine()
	return e.ReturnsIDs(o.d.plan.API.Name())
}

// gives returns whether a worker's engine can give the rest of an answer.
func (o *delivery) gives(w *pool.Worker, rest *api.Rest) bool {
	switch rest.Way {
	case api.WayWhole:
		return true
	case api.WayExact:
		return o.returnsIDs(w)
	}
	return o.continues(w)
}

// mostAttempts is how many workers are asked for the rest of a stream.
const mostAttempts = 3

// goOn asks other workers for the rest until one gives it, or returns the reason why none does.
// drained: the worker so far is well, and so is its host.
// old is the worker so far, nil if it may serve the rest.
func (o *delivery) goOn(ctx context.Context, rest *api.Rest, old *pool.Worker, drained bool) (*response.Rest, string) {
	d, before := o.d, o.attempt.Worker
	failed, reason := o.without(old, rest)
	for range mostAttempts {
		if reason == staysEngine {
			break
		}
		exact := rest.Way == api.WayExact
		reason, d.rest = staysNoWorker, rest
		d.turn.NextAttempt()
		if o.seatApart(ctx, before, failed, !drained) != nil {
			break
		}
		a := d.attempt
		failed = append(failed, a.Worker)
		d.tried = []*pool.Worker{a.Worker} // the stream may come back to the others later
		o.countTokens(ctx, a, rest)
		resp, err := a.goOn()
		v := a.judge(ctx, resp, false, err)
		if err == nil && a.streams(resp) && !body.Compressed(resp.Header) {
			d.Pool.Report(a.Worker, v.outcome)
			o.arrive(ctx, a, drained)
			return &response.Rest{From: resp.Body, Ctx: a.watch.ctx, Joint: rest.Joint}, ""
		}
		a.Leave(false, nil)
		if err == nil {
			_ = resp.Body.Close()
			if !retryable(resp.StatusCode) { // it may be the rest's fault
				v.outcome = a.shows(pool.OutcomeAnswered, "")
			}
		}
		d.Pool.Report(a.Worker, v.outcome)
		outcome := pool.AttemptRetried
		if ctx.Err() != nil {
			outcome = outcomeClientGone
		}
		a.end(outcome, v.outcome.Kind > pool.OutcomeGood)
		if exact && (errors.Is(err, errExact) || err == nil && !retryable(resp.StatusCode)) {
			return nil, notExact
		}
		last := v.suspect && d.lastSuspect()
		if v.suspect {
			d.suspects++
		}
		if ctx.Err() != nil || last || !a.affordable(err) {
			break
		}
	}
	if reason == staysEngine && rest.Way == api.WayExact {
		reason = notExact
	}
	return nil, reason
}

// without returns the workers that cannot give the rest: the one so far, and those whose engines
// continue no answers. If there are no others, it returns the reason.
func (o *delivery) without(old *pool.Worker, rest *api.Rest) (list []*pool.Worker, reason string) {
	d := o.d
	if old != nil {
		list = append(list, old)
	}
	reason = staysEngine
	for i := range d.offers.Table.Rows {
		switch w := d.offers.Table.Rows[i].Worker; {
		case w == old:
		case o.gives(w, rest):
			reason = ""
		default:
			list = append(list, w)
		}
	}
	return list, reason
}

// seatApart finds a seat on none of the failed workers. After a fault it prefers those on other
// hosts than the old worker's.
func (o *delivery) seatApart(ctx context.Context, old *pool.Worker, failed []*pool.Worker, fault bool) error {
	d := o.d
	host := old.Host()
	d.tried = slices.Clone(failed)
	if fault {
		for i := range d.offers.Table.Rows {
			if w := d.offers.Table.Rows[i].Worker; w.Host() == host {
				d.tried = append(d.tried, w)
			}
		}
		want := d.wants()
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

// countTimeout bounds the question for the number of tokens.
const countTimeout = 2 * time.Second

// countTokens asks the engine how many tokens the text so far has, unless the first one has said so. A
// replacement character stands for a token that was no character, and has more tokens than that.
func (o *delivery) countTokens(ctx context.Context, a *attempt, rest *api.Rest) {
	if rest.Exact || strings.Contains(rest.Text, "\ufffd") {
		return
	}
	d := o.d
	ctx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	const most = 8 << 20
	e := a.Worker.Engine()
	n, ok := e.CountText(d.plan.Model, rest.Text, d.AskTokenizer(ctx, d.plan, a.Worker, most))
	if ok {
		rest.Tokens, rest.Exact = n, true
	}
}

// goOn asks the attempt's worker for the rest of a stream.
func (a *attempt) goOn() (*http.Response, error) {
	d := a.d
	req, err := upstream.Redirect(d.proxied, a.Worker.Dial)
	if err != nil {
		return nil, &api.Refusal{Err: err} // not the worker's fault
	}
	resp, _, err := a.send(req)
	return resp, err
}

// arrive records that the stream goes on with an attempt.
func (o *delivery) arrive(ctx context.Context, a *attempt, drained bool) {
	d := o.d
	o.attempt, o.told = a, false
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
