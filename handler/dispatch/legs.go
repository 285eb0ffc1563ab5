package dispatch

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
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// legs are the two legs of an attempt. The attempt itself is the decode leg, with its seat.
// Engines that serve both legs at once get the prefill leg in a goroutine of its own. Others get
// the decode leg once the prefill leg has its answer.
type legs struct {
	decode  *try
	prefill *try // its seat ends with the leg; nil if there was no worker
	leg     engine.Leg

	ctx    context.Context // of the prefill leg
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when the prefill leg has ended

	kept       int64        // bytes of its answer for the decode leg or the client
	handedOver atomic.Int64 // when the prefill leg handed the prompt over, Unix nanoseconds; 0 is not yet

	client context.Context // ends when the client leaves
	forget func() bool     // that it may leave
	span   func(error)     // ends that of the decode leg

	mu      sync.Mutex
	end     context.CancelCauseFunc // ends the decode leg; nil before it begins
	failed  error                   // of the prefill leg
	broke   bool                    // its connection: the request may end engines
	fetched bool                    // the decode worker needs the prompt no more, as far as is known
	left    bool                    // the attempt has ended
	lost    bool                    // that was an error: the worker did not get the prompt
	gone    *time.Timer             // ends the decode leg of a client that left
	unsure  *time.Timer             // looks after the prefill worker; nil if the legs have other deadlines
}

const (
	// legPatience is how much longer than predicted a leg may be silent.
	legPatience = 10 * time.Second
	// abortTime is how long the abort of a leg may take.
	abortTime = 5 * time.Second
)

// legError says that a pair of workers failed to serve the legs of a request.
type legError struct {
	reason string // of the retry, as metrics name it
	err    error
	whole  bool // another pair would fail, too
}

// Reasons of legErrors.
const (
	legPrefill  = "prefill"  // the prefill leg failed
	legTransfer = "transfer" // the decode worker did not get the prompt
)

func prefillFailed(err error, whole bool) *legError { return &legError{legPrefill, err, whole} }
func transferFailed(err error) *legError            { return &legError{reason: legTransfer, err: err} }

func (e *legError) Error() string { return e.reason + " leg: " + e.err.Error() }
func (e *legError) Unwrap() error { return e.err }

var (
	errLegSilent   = errors.New("no answer in time")
	errLegBroken   = errors.New("the leg broke")
	errNotHanded   = errors.New("the engine does not hand over the prompt")
	errPrefillGone = errors.New("the prefill worker does not answer any more")
	errNoPrefill   = errors.New("no prefill worker is available")
	errClientLeft  = fmt.Errorf("the client left: %w", context.Canceled)
)

// startLegs begins the legs of an attempt that parts the request: if the decode leg follows the
// prefill leg, it makes that one. The attempts of other requests have no legs.
func (a *try) startLegs(req *http.Request) error {
	if !a.Terms.Parted {
		return nil
	}
	l := &legs{decode: a, done: make(chan struct{}), client: req.Context()}
	a.legs = l
	if err := l.seatPrefill(req.Context()); err != nil {
		close(l.done)
		return err
	}
	l.describe()
	a.Leg, a.Prefill = &l.leg, &l.prefill.Attempt
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(req.Context()))
	stop := context.AfterFunc(req.Context(), func() { l.cancel(errClientLeft) })
	call := l.request(req)
	if l.of().Together {
		go func() {
			defer stop()
			if err := l.run(call); err != nil {
				l.fail(err)
			}
		}()
		return nil
	}
	defer stop()
	if err := l.run(call); err != nil {
		return err
	}
	l.keep(len(l.leg.Handed) + len(l.leg.Prompt) + len(l.leg.Answer))
	if l.handedOver.Load() == 0 { // the answer ended with the prefill
		if a.Kind == pool.KindStream || l.leg.Answer == nil {
			l.leave() // the decode worker serves the whole request
			a.legs, a.Leg, a.Prefill = nil, nil, nil
			return nil
		}
		a.Answers = a.Prefill
	}
	return nil
}

// fail ends the decode leg because the prefill leg failed, unless it has the prompt.
func (l *legs) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fetched {
		return
	}
	l.failed = err
	if l.end != nil {
		l.end(err)
	}
}

// of returns how the engines share the request.
func (l *legs) of() *engine.Legs { return l.prefill.Worker.Engine().Legs() }

// prefilled returns when the prefill leg had its answer, the zero time if it has none yet.
func (l *legs) prefilled() (t time.Time) {
	if n := l.handedOver.Load(); n != 0 {
		t = time.Unix(0, n)
	}
	return t
}

// watch begins the decode leg, which end ends. If the client leaves, the leg goes on until its
// worker has the prompt. Blocks that nobody fetches would stay in the prefill worker's memory.
func (l *legs) watch(end context.CancelCauseFunc) {
	if l == nil {
		return
	}
	l.span = l.decode.d.Trace.Phase(attempt.SpanDecode, &l.decode.Attempt)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end = end; l.failed != nil {
		end(l.failed)
	}
	if l.decode.Kind != pool.KindStream && !l.of().Together {
		l.unsure = time.AfterFunc(l.limit(0), func() { l.check(false) })
	}
	l.forget = context.AfterFunc(l.client, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.fetched {
			end(errClientLeft)
			return
		}
		l.gone = time.AfterFunc(l.of().Fetches, func() { end(errClientLeft) })
	})
}

// limit returns how long the decode leg may be silent. timeout is the operator's limit, 0 if there is
// none. A leg that is not safe to cancel has the time that its engine takes to give up.
func (l *legs) limit(timeout time.Duration) time.Duration {
	if l == nil {
		return timeout
	}
	own := l.patience()
	switch {
	case l.wedges():
		return max(own, l.of().Fetches)
	case timeout > 0:
		return min(timeout, own)
	}
	return own
}

// wedges returns whether to end the decode leg before its first token may harm its engine. Nothing
// moves it until then.
func (l *legs) wedges() bool { return l != nil && l.of().Wedges }

// patience returns how much time the decode leg has in any case. Both legs of engines that get
// them at once have the same time.
func (l *legs) patience() time.Duration {
	if l.of().Together {
		return max(l.decode.patience(), l.prefill.patience())
	}
	left := l.decode.Terms.PartedTime - l.decode.d.parting.apart.Time // after the prefill
	return legPatience + 4*time.Duration(max(0, left)*float64(time.Millisecond))
}

// check looks whether the prefill worker is there. It does so for answers that are not streamed: their
// decode legs are silent, and the engine could wait for the prompt for minutes. If the worker was not
// there the last time (missed) and is not there now, check ends the leg. The request must be one that
// may be tried again.
func (l *legs) check(missed bool) {
	d, prefill := l.decode.d, l.prefill.Worker
	if time.Since(l.prefilled()) >= l.of().Fetches {
		l.got()
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), legPatience)
	defer cancel()
	key := d.plan.HTTP.Header["Authorization"]
	_, _, err := d.Client.Fetch(ctx, prefill.Dial, http.MethodGet, "/v1/models", nil, key, pool.MaxModelList)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.fetched || l.left:
	case err == nil || !missed:
		l.unsure = time.AfterFunc(legPatience, func() { l.check(err != nil) })
	case d.legsMayRetry() && d.Pool.MayRetry(time.Now()):
		l.end(transferFailed(errPrefillGone)) // not err: the decode worker was connected
	}
}

// arrived records that the decode leg has its header. plain: the answer is no stream. A stream has the
// prompt with its first token only.
func (l *legs) arrived(resp *http.Response, plain bool) {
	if plain {
		l.got()
		l.lost = resp.StatusCode >= 400
	}
}

// got records that the decode worker has the prompt.
func (l *legs) got() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fetched = true; l.client.Err() != nil {
		l.end(errClientLeft)
	}
}

// Leave ends the attempt with its legs: see pool.Seat.
func (a *try) Leave(computed bool, answer *kvscore.Answer) {
	if a.legs != nil && !a.Left() {
		a.legs.leave()
		computed = computed && a.legs.leg.Answer == nil
	}
	a.Seat.Leave(computed, answer)
}

// leave ends the legs with their attempt.
func (l *legs) leave() {
	if l.cancel != nil {
		l.cancel(errClientLeft)
	}
	<-l.done
	if l.forget != nil {
		l.forget()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = true
	l.keep(0)
	if l.unsure != nil {
		l.unsure.Stop()
	}
	d := l.decode.d
	waits := l.handedOver.Load() != 0 && !l.of().Together // the prompt, for a decode worker
	if waits && (l.lost || !l.fetched) {
		d.Pool.CountUnfetched(l.prefill.Worker)
	}
	if l.forget == nil {
		return // the decode leg has not begun
	}
	if l.gone != nil {
		l.gone.Stop()
	}
	a, err := l.decode, error(nil)
	switch o := d.answer; {
	case o != nil && o.attempt == a && o.Whole:
	case l.client.Err() != nil:
		err = errClientLeft
	default:
		err = errLegBroken
	}
	if err != nil {
		l.abort(a)
	}
	l.span(err)
	d.PoolMetrics.leg(legDecode, err, time.Since(a.Begun))
}

// abort ends a leg in its engine, if the end of the connection does not.
func (l *legs) abort(a *try) {
	e, d := a.Worker.Engine(), a.d
	path, body := e.Abort(l.leg.ID)
	if path == "" || l.leg.ID == "" {
		return
	}
	key := d.plan.HTTP.Header["Authorization"]
	d.Pool.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), abortTime)
		defer cancel()
		_, _, _ = d.Client.Fetch(ctx, a.Worker.Dial, http.MethodPost, path, body, key, 4<<10)
	})
}
