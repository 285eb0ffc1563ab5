package split

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
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// maxPrefillAnswer is the longest answer to a prefill phase, in bytes.
const maxPrefillAnswer = 8 << 20

// seat finds a seat for the prefill phase, on the worker that the choice counts on if that is still free.
func (l *Phases) seat(ctx context.Context) error {
	s := l.split
	want, p := s.wants(s.Of.Wants()), new(attempt.Attempt)
	want.Tried = slices.Clone(want.Tried)
	for _, r := range s.Of.Offers().Table.Rows {
		if w := r.Worker; w.IsPrefill() && !w.Engine().Pairs(l.Decode.Worker.Engine(), s.Plan.Name) {
			want.Tried = append(want.Tried, w)
		}
	}
	err := l.owner.SeatPrefill(ctx, &want, chooser{l}, p)
	switch {
	case err == nil:
		l.Prefill = p
		return nil
	case ctx.Err() != nil:
	case errors.Is(err, pool.ErrNoWorker):
		err = errNoPrefill
	case !l.Decode.Worker.ServesWhole():
		return err // the queue's
	}
	return prefillFailed(err, true)
}

// chooser chooses the worker of the prefill phase.
type chooser struct{ *Phases }

// Choose implements pool.Chooser.
func (by chooser) Choose(_ context.Context, c *pool.Candidates) pool.Choice {
	s, bound := by.split, -1
	for i, t := range c.Targets {
		if t.Target == s.Forecast.Prefill && s.Prefill != nil {
			bound = i
		}
	}
	scored := &c.Scored
	*scored = s.Plan.Score
	scored.Phase, scored.Streamed = kvscore.PhasePrefill, true
	return pool.Choice{Request: scored, Policy: s.Policy, Bound: bound}
}

func (chooser) Chosen(*pool.Candidates, int, bool)      {}
func (chooser) Waits(string)                            {}
func (by chooser) Renew() (o pool.Offers, follows bool) { return by.owner.Renew() }

// describe says what the engines must know of the phases.
func (l *Phases) describe() {
	p := l.Prefill
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never fails
	ranks := p.Worker.Ranks()
	room := binary.LittleEndian.Uint64(random[:])>>3 | 1<<61 // TensorRT-LLM's begin at 2^42
	l.phase = engine.Phase{
		ID: "kvr-" + hex.EncodeToString(random[:]), Host: p.Worker.Host(), Rank: p.Target.Rank, Ranks: ranks,
		Room: room - room%uint64(ranks) + uint64(p.Target.Rank), // SGLang finds the rank by it
	}
	p.Worker.Engine().Meet(&l.phase)
}

// run makes the prefill phase. It ends its seat, and reports what the phase has shown of its worker.
func (l *Phases) run(req *http.Request) (err error) {
	defer close(l.done)
	p := l.Prefill
	defer p.Leave(false, nil) // if nothing below has
	ended := p.Call.Trace.Phase(attempt.SpanPrefill, p)
	begun := time.Now()
	status, counts, over, err := l.call(req)
	t := time.Now()
	shown := err
	if errors.Is(err, errAnswered) {
		shown = nil // it has done its part
	}
	ended(shown)
	l.split.Metrics.PhaseEnded(PhasePrefill, shown, t.Sub(begun))
	if err != nil && l.ctx.Err() != nil {
		if l.client.Err() != nil {
			p.CountOutcome("client_gone", false)
		}
		l.abort(p)
		return err
	}
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	l.prefillBroke = status == 0 && err != nil && !unconnected && !errors.Is(err, errPhaseSilent)
	l.split.Pool.Report(p.Worker, outcomeOf(p, status, err))
	clients := status >= 400 && status < 500 && !attempt.Retryable(status) && !attempt.WorkersFault(status)
	if err != nil {
		outcome := observe.AttemptRetried
		if clients {
			outcome = observe.AttemptClientError
		}
		p.CountOutcome(outcome, !clients)
		failed := prefillFailed(fmt.Errorf("worker %s: %w", p.Worker.Dial, err), clients || errors.Is(err, errNoTransfer))
		if clients && l.of().Concurrent {
			// The decode worker's answer says what is wrong, unless it has taken the request.
			time.AfterFunc(phasePatience, func() { l.fail(failed) })
			return nil
		}
		l.abort(p)
		return failed
	}
	p.Seat.FirstToken(t)
	l.owner.Prefilled(p, counts)
	p.Leave(true, nil)
	p.CountOutcome(observe.AttemptPrefilled, false)
	if over { // only of engines that get the decode phase later
		return nil
	}
	l.prefillAnswered.Store(t.UnixNano())
	l.Decode.PrefillAnswered(t)
	return nil
}

// call sends the prefill phase, and reads its answer. over: that is the answer to the client.
func (l *Phases) call(req *http.Request) (status int, counts response.Counts, over bool, err error) {
	p, s := l.Prefill, l.split
	limit := patience(p)
	if most := s.FirstToken; most > 0 && s.Plan.Request.Stream {
		limit = min(limit, most)
	}
	if l.of().Concurrent { // its answer comes after the transfer
		limit += time.Duration(l.Decode.Terms.SplitTime * float64(time.Millisecond))
	}
	ctx, cancel := context.WithTimeoutCause(l.ctx, limit, errPhaseSilent)
	defer cancel()
	defer func() {
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
	}()
	status, data, answer, err := p.Read(req.WithContext(ctx), func(req *http.Request) (*http.Response, error) {
		return s.Client.Phase(req, p.Worker.Dial)
	}, maxPrefillAnswer)
	if answer != nil {
		counts.Prompt, counts.Completion, counts.Cached = answer.Usage()
		result := p.Worker.Engine().ReadTransfer(data, &l.phase)
		over = result == engine.AnswerEnded
		if result == engine.NoTransfer {
			err = attempt.ErrUnread
		}
	}
	if errors.Is(err, attempt.ErrUnread) {
		err = errNoTransfer
	}
	return status, counts, over, err
}

// Answer returns the answer to the client of a request that ended with its prefill.
func (l *Phases) Answer(req *http.Request) *http.Response {
	return &http.Response{
		Status: "200 OK", StatusCode: http.StatusOK, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: req,
		Header: http.Header{"Content-Type": {"application/json"}}, ContentLength: int64(len(l.phase.Answer)),
		Body: io.NopCloser(bytes.NewReader(l.phase.Answer)),
	}
}

// patience returns how long a phase of the attempt may be silent. The forecast is far off until the
// router has learned how fast the workers are, so a slow one has some time.
func patience(a *attempt.Attempt) time.Duration {
	const slowest = 2 * time.Millisecond // a token
	predicted := 4 * time.Duration(a.Terms.TTFT()*float64(time.Millisecond))
	return phasePatience + max(predicted, time.Duration(a.Tokens)*slowest)
}

// outcomeOf returns what the prefill phase has shown of its worker.
func outcomeOf(a *attempt.Attempt, status int, err error) worker.Outcome {
	switch {
	case err == nil:
		return a.Shows(worker.OutcomeGood, "")
	case errors.Is(err, errPhaseSilent):
		a.Worker.AskAgain()
		return worker.Outcome{} // it may be slow
	case status == 0:
		return a.Unanswered(err)
	case attempt.Retryable(status):
		return a.Shows(worker.OutcomeBusy, err.Error())
	case attempt.WorkersFault(status):
		return a.Errored(err.Error(), status >= 500)
	}
	return a.Shows(worker.OutcomeAnswered, "")
}
