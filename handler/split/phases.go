package split

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// Owner is the request whose phases are made.
type Owner interface {
	// SeatPrefill finds a seat for the prefill attempt, within the patience of the request.
	SeatPrefill(ctx context.Context, want *pool.Wants, by pool.Chooser, p *attempt.Attempt) error
	// Renew is that of pool.Chooser.
	Renew() (o pool.Offers, follows bool)
	// Prefilled learns from the counts of the attempt that has computed the prompt.
	Prefilled(p *attempt.Attempt, c response.Counts)
	// ChargeRetry charges another attempt to the retry budget, and returns whether it may follow.
	ChargeRetry() bool
}

// Phases are the two phases of an attempt. The attempt itself is the decode phase, with its seat.
// Engines that serve both phases at once get the prefill phase in a goroutine of its own. Others get
// the decode phase once the prefill phase has its answer.
type Phases struct {
	Decode  *attempt.Attempt
	Prefill *attempt.Attempt // its seat ends with the phase; nil if none was found, which is an error of Begin

	split *Request
	owner Owner
	phase engine.Phase

	ctx    context.Context // of the prefill phase
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when the prefill phase has ended

	kept            int64        // bytes of its answer for the decode phase or the client
	prefillAnswered atomic.Int64 // when the prefill phase had its answer, Unix nanoseconds; 0 is not yet

	client        context.Context // ends when the client leaves
	unwatchClient func() bool     // ends the wait for that; nil before the decode phase begins
	endSpan       func(error)     // of the decode phase

	mu           sync.Mutex
	endDecode    context.CancelCauseFunc // ends the decode phase; nil before it begins
	prefillErr   error                   // of the prefill phase
	prefillBroke bool                    // the connection of the prefill phase broke
	transferred  bool                    // the decode worker needs the prompt no more, as far as is known
	decodeFailed bool                    // the decode worker answered with an error, and did not get the prompt
	ended        bool                    // the attempt has ended
	clientTimer  *time.Timer             // ends the decode phase of a client that left
	checkTimer   *time.Timer             // makes the next check; nil if the phases have other deadlines
}

const (
	// phasePatience is how much longer than predicted a phase may be silent.
	phasePatience = 10 * time.Second
	// abortTime is how long the abort of a phase may take.
	abortTime = 5 * time.Second
)

// Error says that a pair of workers failed to serve the phases of a request.
type Error struct {
	Reason string // of the retry, as metrics name it
	err    error
	whole  bool // another pair would fail, too
}

// The phases, and the reasons of an Error: the prefill phase failed, or the decode worker did not get the
// prompt.
const (
	PhasePrefill = "prefill"
	PhaseDecode  = "decode"

	phaseTransfer = "transfer"
)

func prefillFailed(err error, whole bool) *Error { return &Error{PhasePrefill, err, whole} }
func transferFailed(err error) *Error            { return &Error{Reason: phaseTransfer, err: err} }

func (e *Error) Error() string { return e.Reason + " phase: " + e.err.Error() }
func (e *Error) Unwrap() error { return e.err }

var (
	errPhaseSilent = errors.New("no answer in time")
	errPhaseBroken = errors.New("the phase broke")
	errNoTransfer  = errors.New("the engine does not hand over the prompt")
	errNoPrefill   = errors.New("no prefill worker is available")
	errClientLeft  = fmt.Errorf("the client left: %w", context.Canceled)
	errAnswered    = fmt.Errorf("the whole answer has come: %w", context.Canceled)

	// ErrPrefillGone ends a decode phase whose retry is charged already.
	ErrPrefillGone = errors.New("the prefill worker does not answer any more")
)

// Begin begins the phases of an attempt that splits the request: if the decode phase follows the prefill
// phase, it makes that one. whole: the phases have ended, and the decode worker is to serve the whole request.
// Otherwise the caller ends them with Leave, also after an error. The error is an *Error, the queue's, or the
// context's.
func (s *Request) Begin(o Owner, a *attempt.Attempt, req *http.Request) (l *Phases, whole bool, err error) {
	l = &Phases{split: s, owner: o, Decode: a, done: make(chan struct{}), client: req.Context()}
	if err := l.seat(req.Context()); err != nil {
		close(l.done)
		return l, false, err
	}
	l.describe()
	a.Phase, a.Prefill = &l.phase, l.Prefill
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(req.Context()))
	stop := context.AfterFunc(req.Context(), func() { l.cancel(errClientLeft) })
	phase := l.phase
	phase.Prefill = true
	l.Prefill.Phase = &phase
	call := l.Prefill.Build(req)
	if l.of().Concurrent {
		go func() {
			defer stop()
			if err := l.run(call); err != nil {
				l.fail(err)
			}
		}()
		return l, false, nil
	}
	defer stop()
	if err := l.run(call); err != nil {
		return l, false, err
	}
	l.keep(len(l.phase.TransferParams) + len(l.phase.Prompt) + len(l.phase.Answer))
	if l.prefillAnswered.Load() == 0 { // the answer ended with the prefill
		if a.Kind == worker.KindStream || l.phase.Answer == nil {
			l.Leave(false)
			a.Phase, a.Prefill = nil, nil
			return l, true, nil
		}
		a.Answers = l.Prefill
	}
	return l, false, nil
}

// fail ends the decode phase because the prefill phase failed, unless it has the prompt.
func (l *Phases) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.transferred {
		return
	}
	l.prefillErr = err
	if l.endDecode != nil {
		l.endDecode(err)
	}
}

// of returns how the engines share the request.
func (l *Phases) of() *engine.Phases { return l.Prefill.Worker.Engine().Phases() }

// Prefilled returns when the prefill phase had its answer, the zero time if it has none yet.
func (l *Phases) Prefilled() (t time.Time) {
	if n := l.prefillAnswered.Load(); n != 0 {
		t = time.Unix(0, n)
	}
	return t
}

// begin begins the decode phase, which end ends. If the client leaves, the phase goes on until its
// worker has the prompt. Blocks that nobody fetches would stay in the prefill worker's memory.
func (l *Phases) begin(end context.CancelCauseFunc) {
	l.endSpan = l.Decode.Call.Trace.Phase(attempt.SpanDecode, l.Decode)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.endDecode = end; l.prefillErr != nil {
		end(l.prefillErr)
	}
	if l.Decode.Kind != worker.KindStream && !l.of().Concurrent {
		l.checkTimer = time.AfterFunc(l.limit(0), func() { l.check(false) })
	}
	l.unwatchClient = context.AfterFunc(l.client, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.transferred {
			end(errClientLeft)
			return
		}
		l.clientTimer = time.AfterFunc(l.of().TransferTimeout, func() { end(errClientLeft) })
	})
}

// Bound sets what ends the decode phase. A phase that is not safe to cancel has the time that its engine takes
// to give up.
func (l *Phases) Bound(b *attempt.Bounds) {
	b.Context, b.Begins = context.WithoutCancel(l.client), l.begin
	if l.Decode.Kind == worker.KindStream {
		b.First = l.limit(b.First)
	}
}

// limit returns how long the decode phase may be silent. timeout is the operator's limit, 0 if there is
// none.
func (l *Phases) limit(timeout time.Duration) time.Duration {
	own := l.patience()
	switch {
	case l.CancelUnsafe():
		return max(own, l.of().TransferTimeout)
	case timeout > 0:
		return min(timeout, own)
	}
	return own
}

// CancelUnsafe returns whether to end the decode phase before its first token may harm its engine. Nothing
// moves it until then.
func (l *Phases) CancelUnsafe() bool { return l != nil && l.of().CancelUnsafe }

// patience returns how much time the decode phase has in any case. Both phases of engines that get
// them at once have the same time.
func (l *Phases) patience() time.Duration {
	if l.of().Concurrent {
		return max(patience(l.Decode), patience(l.Prefill))
	}
	left := l.Decode.Terms.SplitTime - l.split.Forecast.Time // after the prefill
	return phasePatience + 4*time.Duration(max(0, left)*float64(time.Millisecond))
}

// check looks whether the prefill worker is there, for an answer that is not streamed. Nothing else ends a
// silent phase. Without check, such a request hangs if the decode engine waits for a prefill worker that died
// before the transfer. If the worker was not there the last time (missed) and is not there now, check ends
// the phase. It charges the retry budget first: a phase that may not be retried goes on, as it may have the
// prompt.
func (l *Phases) check(missed bool) {
	if time.Since(l.Prefilled()) >= l.of().TransferTimeout {
		l.Transferred()
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), phasePatience)
	defer cancel()
	_, _, err := l.split.Client.Fetch(ctx, l.Prefill.Worker.Dial, http.MethodGet, "/v1/models", nil, l.key(), worker.MaxModelList)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.transferred || l.ended:
	case err == nil || !missed:
		l.checkTimer = time.AfterFunc(phasePatience, func() { l.check(err != nil) })
	case l.owner.ChargeRetry():
		l.endDecode(transferFailed(ErrPrefillGone)) // not err: the decode worker was connected
	}
}

// Arrived records that the decode phase has an answer that is no stream. A stream has the prompt with its
// first token only.
func (l *Phases) Arrived(status int) {
	l.Transferred()
	l.decodeFailed = status >= 400
}

// Transferred records that the decode worker has the prompt.
func (l *Phases) Transferred() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.transferred = true; l.client.Err() != nil {
		l.endDecode(errClientLeft)
	}
}

// Leave ends the phases with their attempt. whole: its answer has come to its end.
func (l *Phases) Leave(whole bool) {
	why := errClientLeft
	if whole {
		why = errAnswered
	}
	if l.cancel != nil {
		l.cancel(why)
	}
	<-l.done
	if whole && l.Prefill != nil { // its own answer may come later
		l.Prefill.CountOutcome(observe.AttemptPrefilled, false)
	}
	if l.unwatchClient != nil {
		l.unwatchClient()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	l.keep(0)
	if l.checkTimer != nil {
		l.checkTimer.Stop()
	}
	waits := l.prefillAnswered.Load() != 0 && !l.of().Concurrent // the prompt, for a decode worker
	if waits && (l.decodeFailed || !l.transferred) {
		l.Prefill.Worker.Past.Unfetched()
	}
	if l.unwatchClient == nil {
		return // the decode phase has not begun
	}
	if l.clientTimer != nil {
		l.clientTimer.Stop()
	}
	var err error
	switch {
	case whole:
	case l.client.Err() != nil:
		err = errClientLeft
	default:
		err = errPhaseBroken
	}
	if err != nil {
		l.abort(l.Decode)
	}
	l.endSpan(err)
	l.split.Metrics.PhaseEnded(PhaseDecode, err, time.Since(l.Decode.Begun))
}

// abort ends a phase in its engine, if the end of the connection does not.
func (l *Phases) abort(a *attempt.Attempt) {
	e := a.Worker.Engine()
	path, body := e.Abort(l.phase.ID)
	if path == "" || l.phase.ID == "" {
		return
	}
	key := l.key()
	l.split.Pool.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), abortTime)
		defer cancel()
		_, _, _ = l.split.Client.Fetch(ctx, a.Worker.Dial, http.MethodPost, path, body, key, 4<<10)
	})
}

func (l *Phases) key() []string { return l.split.Plan.HTTP.Header["Authorization"] }

// Failure returns why an attempt shows that its pair of workers failed; nil if it does not.
func (l *Phases) Failure(resp *http.Response, err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	least := http.StatusBadRequest // a prefill worker that has computed the prompt found the request right
	if err == nil && l.of().Concurrent {
		least = http.StatusInternalServerError
	}
	switch {
	case errors.Is(err, attempt.ErrFirstToken):
		return transferFailed(err)
	case err == nil && resp.StatusCode >= least && !attempt.Retryable(resp.StatusCode):
		return transferFailed(errors.New("status " + resp.Status)) // also from a healthy decode worker
	}
	return nil
}

// Broke returns whether the connection of the prefill phase broke: the request may end engines.
func (l *Phases) Broke(e *Error) bool { return e.Reason == PhasePrefill && l.prefillBroke }

// BrokeBefore returns whether a stream broke because its decode worker did not get the prompt; nil
// if it did not.
func (l *Phases) BrokeBefore(why error) *Error {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.transferred {
		return nil
	}
	if e, ok := errors.AsType[*Error](why); ok {
		return e
	}
	if errors.Is(why, attempt.ErrFirstToken) || errors.Is(why, response.ErrEvent) {
		return transferFailed(why)
	}
	return nil
}

// keep counts what is kept of the prefill worker's answer, as a body in memory.
func (l *Phases) keep(bytes int) {
	l.split.Pool.Memory.Held.Add(int64(bytes) - l.kept)
	l.kept = int64(bytes)
}

// Sent drops what the decode worker has got with its request.
func (l *Phases) Sent(req *http.Request) {
	l.phase.TransferParams, l.phase.Prompt = nil, nil
	req.GetBody = nil // has it, too
	l.keep(len(l.phase.Answer))
}
