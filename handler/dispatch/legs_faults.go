package dispatch

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"go.uber.org/zap"
)

// judgeLegs decides what follows from an attempt whose pair of workers failed. ok is false if it
// did not: then the attempt is judged as any other.
func (a *attempt) judgeLegs(ctx context.Context, resp *http.Response, err error) (v verdict, ok bool) {
	if a.legs == nil || ctx.Err() != nil {
		return v, false
	}
	d := a.d
	legs, ok := errors.AsType[*legError](err)
	switch {
	case ok:
	case errors.Is(err, errFirstToken):
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
	return status >= least && !retryable(status)
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
	if errors.Is(why, errFirstToken) || errors.Is(why, response.ErrEvent) {
		return transferFailed(why)
	}
	return nil
}

// moveLegs prepares the move of a stream, whose legs may have failed.
func (a *attempt) moveLegs(failed *legError, way string) {
	d := a.d
	if failed != nil {
		a.ended.Store(true) // its worker is well
		a.computes().countRetry(failed.reason)
		d.parting.retryLegs(d, a, failed)
	}
	if way != api.WayWhole {
		d.parting.asked, d.parting.whole = true, "its stream goes on elsewhere" // no prefill leg has the text so far
	}
}

// askForLegs makes the proxy try again after a pair of workers failed, and returns what the proxy
// sees of the attempt.
func (a *attempt) askForLegs(req *http.Request, resp *http.Response, e *legError) *http.Response {
	d := a.d
	a.computes().countRetry(e.reason)
	if c := d.Logger.Check(zap.DebugLevel, "legs failed"); c != nil {
		c.Write(zap.String("prefill", a.computes().Worker.Dial), zap.String("decode", a.Worker.Dial), zap.Error(e))
	}
	d.parting.retryLegs(d, a, e)
	if resp != nil {
		a.hold(req, resp)
	}
	return noAnswer(req)
}

// retryLegs records that a pair of workers failed. The next attempt uses another pair, or serves the
// request whole; the decode worker has not failed.
func (p *parting) retryLegs(d *Dispatch, a *attempt, e *legError) {
	if n := len(d.tried); n > 0 && d.tried[n-1] == a.Worker {
		d.tried = d.tried[:n-1]
	}
	p.tries++
	prefill := a.legs.prefill
	if prefill != nil {
		prefill.end(pool.AttemptRetried, true) // if it has not ended
		p.failed = append(p.failed, prefill.Worker)
		p.refused = p.refused || e.whole
	}
	if e.reason == legTransfer && prefill != nil {
		p.blame, p.silent = [2]*pool.Worker{prefill.Worker, a.Worker}, errors.Is(e, errFirstToken)
		prefill.Worker.AskAgain()
	}
	if p.tries >= maxPairsTried || e.whole || e.reason == legTransfer && a.Worker.ServesWhole() {
		p.whole = "its legs failed: " + e.Error()
	}
}

// keepHanded counts what a prefill worker has answered, as a body in memory.
func (d *Dispatch) keepHanded(l *engine.Leg) {
	d.parting.kept = int64(len(l.Handed) + len(l.Prompt) + len(l.Answer))
	d.Pool.Memory.Held.Add(d.parting.kept)
}

func (d *Dispatch) freeHanded() {
	d.Pool.Memory.Held.Add(-d.parting.kept)
	d.parting.kept = 0
}

// dropSent drops what the decode leg has got. No other leg gets it: blocks are fetched once.
func (d *Dispatch) dropSent(l *legs) {
	d.parting.handed, l.leg.Handed, l.leg.Prompt = nil, nil, nil
	d.sent.GetBody = nil // has it, too
	d.freeHanded()
}

// dropHanded gives up the prompt that a prefill worker keeps for the request.
func (d *Dispatch) dropHanded() {
	d.freeHanded()
	if h := d.parting.handed; h != nil {
		d.parting.handed = nil
		d.Pool.CountUnfetched(h.prefill.Worker)
	}
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

// noAnswer is what the proxy sees of an attempt whose legs failed. An error would count against
// the decode worker in the proxy's health checks.
func noAnswer(req *http.Request) *http.Response {
	return &http.Response{
		Status: "200 OK", StatusCode: http.StatusOK, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: make(http.Header), Body: http.NoBody, Request: req,
	}
}
