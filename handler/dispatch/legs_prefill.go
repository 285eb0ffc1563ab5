package dispatch

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// maxHandedOver is the longest answer to a prefill leg, in bytes.
const maxHandedOver = 8 << 20

// seatPrefill finds a seat for the prefill leg, on the worker that the choice counts on if that
// is still free.
func (l *legs) seatPrefill(ctx context.Context) error {
	d := l.decode.d
	want, offers, p := d.prefillWants(), d.offers, &try{d: d}
	want.Tried = append(d.pairless(l.decode.Worker), want.Tried...)
	want.Patience = d.patience()
	waited, err := d.Pool.Seat(ctx, &want, &offers, prefillChooser{d}, &p.Seat)
	d.wait.waited += waited
	if errors.Is(err, pool.ErrNoWorker) {
		err = errNoPrefill
	}
	if queued := err != nil && ctx.Err() == nil && !errors.Is(err, errNoPrefill); queued && !l.decode.Worker.ServesWhole() {
		d.turnAway(err)
		return d.wait.turnedAway
	}
	if err != nil {
		return prefillFailed(err, true)
	}
	l.prefill = p
	p.Seated(&d.Call, d.reasonOf(false, &p.Terms))
	p.Number, p.CostsTime = d.attempts, d.costsTime(&p.Seat)
	p.Log()
	d.Trace.Selected(&p.Attempt)
	return nil
}

// prefillChooser chooses the worker of the prefill leg.
type prefillChooser struct{ *Dispatch }

// Choose implements pool.Chooser.
func (by prefillChooser) Choose(_ context.Context, c *pool.Candidates) pool.Choice {
	d, bound := by.Dispatch, -1
	for i, t := range c.Targets {
		if t.Target == d.parting.apart.Prefill && d.parting.prefill != nil {
			bound = i
		}
	}
	scored := &c.Scored
	*scored = d.plan.Score
	scored.Leg, scored.Streamed = kvscore.LegPrefill, true
	return pool.Choice{Request: scored, Policy: d.policy(), Bound: bound}
}

func (prefillChooser) Chosen(*pool.Candidates, int, bool) {}
func (prefillChooser) Waits()                             {}

// describe says what the engines must know of the legs.
func (l *legs) describe() {
	p := l.prefill
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never fails
	ranks := p.Worker.Ranks()
	room := binary.LittleEndian.Uint64(random[:])>>3 | 1<<61 // TensorRT-LLM's begin at 2^42
	l.leg = engine.Leg{
		ID: "kvr-" + hex.EncodeToString(random[:]), Host: p.Worker.Host(), Rank: p.Target.Rank, Ranks: ranks,
		Room: room - room%uint64(ranks) + uint64(p.Target.Rank), // SGLang finds the rank by it
	}
	p.Worker.Engine().Meet(&l.leg)
}

// request returns the request of the prefill leg.
func (l *legs) request(req *http.Request) *http.Request {
	d, p, leg := l.decode.d, l.prefill, l.leg
	leg.Prefill = true
	r := attempt.Request{Plan: d.plan, Body: d.Body, Worker: p.Worker, Target: p.Target, Leg: &leg, Shared: true}
	out := *d.Trace.Carry(r.Build(req))
	u := *out.URL // the transport changes it, and that of the decode leg
	out.URL = &u
	return &out
}

// run makes the prefill leg. It ends its seat, and reports what the leg has shown of its worker.
func (l *legs) run(req *http.Request) (err error) {
	defer close(l.done)
	p, d := l.prefill, l.decode.d
	defer p.Leave(false, nil) // if nothing below has
	ended := d.Trace.Phase(attempt.SpanPrefill, &p.Attempt)
	begun := time.Now()
	status, counts, over, err := l.call(req)
	t := time.Now()
	ended(err)
	d.PoolMetrics.leg(legPrefill, err, t.Sub(begun))
	if err != nil && l.ctx.Err() != nil {
		if l.client.Err() != nil {
			p.End(outcomeClientGone, false)
		}
		l.abort(p)
		return err
	}
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	l.broke = status == 0 && err != nil && !unconnected && !errors.Is(err, errLegSilent)
	d.Pool.Report(p.Worker, p.legOutcome(status, err))
	clients := status >= 400 && status < 500 && !attempt.Retryable(status) && !attempt.WorkersFault(status)
	if err != nil {
		outcome := pool.AttemptRetried
		if clients {
			outcome = pool.AttemptClientError
		}
		p.End(outcome, !clients)
		failed := prefillFailed(fmt.Errorf("worker %s: %w", p.Worker.Dial, err), clients || errors.Is(err, errNotHanded))
		if clients && l.of().Together {
			// The decode worker's answer says what is wrong, unless it has taken the request.
			time.AfterFunc(legPatience, func() { l.fail(failed) })
			return nil
		}
		l.abort(p)
		return failed
	}
	p.Seat.FirstToken(t)
	l.learn(counts)
	p.Leave(true, nil)
	p.End(pool.AttemptPrefilled, false)
	if over { // only of engines that get the decode leg later
		return nil
	}
	l.handedOver.Store(t.UnixNano())
	l.decode.HandedOver(t)
	return nil
}

// call sends the prefill leg, and reads its answer. over: that is the answer to the client.
func (l *legs) call(req *http.Request) (status int, counts response.Counts, over bool, err error) {
	p, d := l.prefill, l.decode.d
	limit := p.patience()
	if most := time.Duration(d.Timeouts.FirstToken); most > 0 && d.plan.Request.Stream {
		limit = min(limit, most)
	}
	if l.of().Together { // its answer comes after the transfer
		limit += time.Duration(l.decode.Terms.PartedTime * float64(time.Millisecond))
	}
	ctx, cancel := context.WithTimeoutCause(l.ctx, limit, errLegSilent)
	defer cancel()
	defer func() {
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
	}()
	resp, err := d.Client.Leg(req.WithContext(ctx), p.Worker.Dial)
	if err != nil {
		return 0, counts, false, err
	}
	defer resp.Body.Close()
	response.Unpack(resp)
	data, err := upstream.ReadAll(resp.Body, maxHandedOver)
	tooLong := errors.Is(err, upstream.ErrTooLong)
	switch {
	case err != nil && !tooLong:
		return 0, counts, false, err
	case resp.StatusCode >= 300:
		return resp.StatusCode, counts, false, fmt.Errorf("status %s", resp.Status)
	case tooLong:
		return resp.StatusCode, counts, false, errNotHanded
	}
	answer := d.plan.Request.NewAnswer(false)
	answer.Write(data)
	answer.Finish()
	counts.Prompt, counts.Completion, counts.Cached = answer.Usage()
	handed := p.Worker.Engine().Handed(data, &l.leg)
	if answer.Failed() || handed == engine.NotHanded {
		return resp.StatusCode, counts, false, errNotHanded
	}
	return resp.StatusCode, counts, handed == engine.Over, nil
}

// over returns whether the answer to the client ended with its prefill.
func (l *legs) over() bool { return l != nil && l.leg.Answer != nil }

// answer returns the answer to the client of a request that ended with its prefill; nil if there is
// none.
func (l *legs) answer(req *http.Request) *http.Response {
	if !l.over() {
		return nil
	}
	return &http.Response{
		Status: "200 OK", StatusCode: http.StatusOK, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: req,
		Header: http.Header{"Content-Type": {"application/json"}}, ContentLength: int64(len(l.leg.Answer)),
		Body: io.NopCloser(bytes.NewReader(l.leg.Answer)),
	}
}

// patience returns how long a leg of the attempt may be silent. The forecast is far off until the
// router has learned how fast the workers are, so a slow one has some time.
func (a *try) patience() time.Duration {
	const slowest = 2 * time.Millisecond // a token
	predicted := 4 * time.Duration(a.Terms.TTFT()*float64(time.Millisecond))
	return legPatience + max(predicted, time.Duration(a.Tokens)*slowest)
}

// legOutcome returns what the prefill leg has shown of its worker.
func (a *try) legOutcome(status int, err error) pool.Outcome {
	switch {
	case err == nil:
		return a.Good()
	case errors.Is(err, errLegSilent):
		a.Worker.AskAgain()
		return pool.Outcome{} // it may be slow
	case status == 0:
		return a.Unanswered(err)
	case attempt.Retryable(status):
		return a.Shows(pool.OutcomeBusy, err.Error())
	case attempt.WorkersFault(status):
		return a.Errored(err.Error(), status >= 500)
	}
	return a.Shows(pool.OutcomeAnswered, "")
}

// learn records the counts of the prompt in the index, the model's ratios and the metrics.
func (l *legs) learn(c response.Counts) {
	o := &delivery{d: l.decode.d, attempt: l.prefill}
	o.Counts = c
	kind := worker.ReportKind{API: o.d.plan.API.Name()}
	o.learnPrompt(o.attempt.Worker.CachedTokens(kind, c.Cached))
}
