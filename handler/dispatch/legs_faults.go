package dispatch

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
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
		legs = &legError{legTransfer, err, false}
	case err == nil && resp.StatusCode >= 500 && !retryable(resp.StatusCode):
		legs = &legError{legTransfer, errors.New("status " + resp.Status), false} // also from a healthy decode worker
	default:
		return v, false
	}
	v = verdict{do: retry, reason: legs.reason, legs: legs}
	if d.Limits.Set() && !d.Limits.allow(d.start, d.attempts) {
		v.do = fail
		if resp != nil {
			v.do = deliver
		}
	}
	return v, true
}

// askForLegs makes the proxy try again after a pair of workers failed, and returns what the proxy
// sees of the attempt.
func (d *Dispatch) askForLegs(req *http.Request, resp *http.Response, e *legError) *http.Response {
	a := d.attempt
	d.countRetry(a.computes(), e.reason)
	if c := d.Logger.Check(zap.DebugLevel, "legs failed"); c != nil {
		c.Write(zap.String("prefill", a.computes().Worker.Dial), zap.String("decode", a.Worker.Dial), zap.Error(e))
	}
	d.parting.retryLegs(d, a, e)
	if resp != nil {
		d.hold(req, resp)
	}
	return noAnswer(req)
}

// retryLegs records that a pair of workers failed. The next attempt uses another pair, or serves the
// request whole; the decode worker has not failed.
func (p *parting) retryLegs(d *Dispatch, a *attempt, e *legError) {
	d.tried = d.tried[:len(d.tried)-1]
	p.handed = nil
	p.tries++
	prefill := a.legs.prefill
	if prefill != nil {
		p.failed = append(p.failed, prefill.Worker)
	}
	if e.reason == legTransfer && prefill != nil {
		p.blame = [2]*pool.Worker{prefill.Worker, a.Worker}
		prefill.Worker.AskAgain()
	}
	if p.tries >= maxPairsTried || e.whole || e.reason == legTransfer && a.Worker.ServesWhole() {
		p.whole = "its legs failed: " + e.Error()
	}
}

// settled avoids a pair whose transfer failed, once a good answer to the same request has shown
// that the request was not to blame.
func (p *parting) settled(of *pool.Pool, resp *http.Response) {
	p.handed = nil
	if p.blame[0] != nil && resp.StatusCode < 300 {
		of.AvoidPair(p.blame[0], p.blame[1], time.Now())
		of.Incidents.Raise(time.Now(), incidentTransfers, of.Logger)
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
