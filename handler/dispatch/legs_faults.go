package dispatch

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"go.uber.org/zap"
)

// judgeLegs decides what follows from an attempt whose pair of workers failed. ok is false if it
// did not: then the attempt is judged as any other.
func (a *try) judgeLegs(ctx context.Context, resp *http.Response, err error) (v verdict, ok bool) {
	if a.legs == nil || ctx.Err() != nil {
		return v, false
	}
	d := a.d
	legs, ok := errors.AsType[*legError](err)
	switch {
	case ok:
	case errors.Is(err, attempt.ErrFirstToken):
		legs = transferFailed(err)
	case err == nil && a.legs.refused(resp.StatusCode):
		legs = transferFailed(errors.New("status " + resp.Status)) // also from a healthy decode worker
	default:
		return v, false
	}
	v = verdict{do: retry, reason: legs.reason, legs: legs, suspect: ok && legs.reason == legPrefill && a.legs.broke}
	if !d.legsMayRetry() || v.suspect && d.lastSuspect() {
		v.do = fail
		if resp != nil {
			v.do = deliver
		}
	}
	return v, true
}

// legsMayRetry returns whether the operator's limits allow another attempt.
func (d *Dispatch) legsMayRetry() bool {
	return !d.Limits.Set() || d.Limits.allow(d.start, d.attempts)
}

// refused returns whether the status of a decode leg is that of a failed transfer. A prefill worker
// that has handed the prompt over found nothing wrong with the request.
func (l *legs) refused(status int) bool {
	least := http.StatusBadRequest
	if l.of().Together {
		least = http.StatusInternalServerError
	}
	return status >= least && !attempt.Retryable(status)
}

// brokeBefore returns whether a stream broke because its decode worker did not get the prompt; nil
// if it did not.
func (l *legs) brokeBefore(why error) *legError {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fetched {
		return nil
	}
	if e, ok := errors.AsType[*legError](why); ok {
		return e
	}
	if errors.Is(why, attempt.ErrFirstToken) || errors.Is(why, response.ErrEvent) {
		return transferFailed(why)
	}
	return nil
}

// moveLegs prepares the move of a stream, whose legs may have failed.
func (a *try) moveLegs(failed *legError, way string) {
	d := a.d
	if failed != nil {
		a.Uncounted() // its worker is well
		a.Computes().CountRetry(failed.reason)
		d.parting.retryLegs(d, a, failed)
	}
	if way != api.WayWhole {
		d.parting.asked, d.parting.whole = true, "its stream goes on elsewhere" // no prefill leg has the text so far
	}
}

// retryLegs prepares another attempt after a pair of workers failed.
func (a *try) retryLegs(e *legError) {
	d := a.d
	a.Computes().CountRetry(e.reason)
	if c := d.Logger.Check(zap.DebugLevel, "legs failed"); c != nil {
		c.Write(zap.String("prefill", a.Computes().Worker.Dial), zap.String("decode", a.Worker.Dial), zap.Error(e))
	}
	d.parting.retryLegs(d, a, e)
}

// retryLegs records that a pair of workers failed. The next attempt uses another pair, or serves the
// request whole; the decode worker has not failed.
func (p *parting) retryLegs(d *Dispatch, a *try, e *legError) {
	if n := len(d.tried); n > 0 && d.tried[n-1] == a.Worker {
		d.tried = d.tried[:n-1]
	}
	p.tries++
	prefill := a.legs.prefill
	if prefill != nil {
		prefill.End(pool.AttemptRetried, true) // if it has not ended
		p.failed = append(p.failed, prefill.Worker)
		p.refused = p.refused || e.whole
	}
	if e.reason == legTransfer && prefill != nil {
		p.blame, p.silent = [2]*pool.Worker{prefill.Worker, a.Worker}, errors.Is(e, attempt.ErrFirstToken)
		prefill.Worker.AskAgain()
	}
	if p.tries >= maxPairsTried || e.whole || e.reason == legTransfer && a.Worker.ServesWhole() {
		p.whole = "its legs failed: " + e.Error()
	}
}

// keep counts what is kept of the prefill worker's answer, as a body in memory.
func (l *legs) keep(bytes int) {
	l.decode.d.Pool.Memory.Held.Add(int64(bytes) - l.kept)
	l.kept = int64(bytes)
}

// sent drops what the decode worker has got with its request.
func (l *legs) sent(req *http.Request) {
	l.leg.Handed, l.leg.Prompt = nil, nil
	req.GetBody = nil // has it, too
	l.keep(len(l.leg.Answer))
}

// settled reports why the legs failed, once a good answer to the same request has shown that the
// request was not to blame. Requests avoid a pair whose transfer failed. l are the legs of that answer,
// nil if it came whole.
func (p *parting) settled(of *pool.Pool, l *legs, good bool) {
	if l != nil && good {
		of.PairWorks(l.prefill.Worker, l.decode.Worker)
	}
	if p.refused && good {
		of.Incidents.Raise(time.Now(), incidentNotHanded, of.Logger)
		p.refused = false
	}
	if p.blame[0] != nil && good && (l == nil || p.blame != [2]*pool.Worker{l.prefill.Worker, l.decode.Worker}) {
		if of.PairFailed(p.blame[0], p.blame[1], p.silent, time.Now()) {
			of.Incidents.Raise(time.Now(), incidentTransfers, of.Logger)
		}
		p.blame = [2]*pool.Worker{}
	}
}
