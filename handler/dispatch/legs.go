package dispatch

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// legs are the two legs of an attempt. The attempt itself is the decode leg, with its seat.
// Engines that serve both legs at once get the prefill leg in a goroutine of its own. Others get
// the decode leg once the prefill leg has its answer.
type legs struct {
	decode  *attempt
	prefill *attempt // its seat ends with the leg; nil if there was no worker
	leg     engine.Leg

	ctx    context.Context // of the prefill leg
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when the prefill leg has ended

	handedOver atomic.Int64 // when the prefill leg had its answer, Unix nanoseconds; 0 is not yet

	client context.Context // ends when the client leaves
	forget func() bool     // that it may leave
	span   func(error)     // ends that of the decode leg

	mu      sync.Mutex
	end     context.CancelCauseFunc // ends the decode leg; nil before it begins
	failed  error                   // of the prefill leg
	broke   bool                    // its connection: the request may end engines
	fetched bool                    // the decode worker has sent something: it has the prompt
	gone    *time.Timer             // ends the decode leg of a client that left
}

const (
	// legPatience is how much longer than predicted a leg may be silent.
	legPatience = 10 * time.Second
	// fetchTime is how long a decode leg goes on after its client left. Its worker then
	// fetches the prompt, and the prefill worker can free it.
	fetchTime = 30 * time.Second
	// maxHandedOver is the longest answer to a prefill leg, in bytes.
	maxHandedOver = 8 << 20
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

func (e *legError) Error() string { return e.reason + " leg: " + e.err.Error() }
func (e *legError) Unwrap() error { return e.err }

var (
	errLegSilent  = errors.New("no answer in time")
	errLegBroken  = errors.New("the leg broke")
	errNotHanded  = errors.New("the engine does not hand over the prompt")
	errNoPrefill  = errors.New("no prefill worker is available")
	errClientLeft = fmt.Errorf("the client left: %w", context.Canceled)
)

// startLegs begins the legs of an attempt that parts the request: if the decode leg follows the
// prefill leg, it makes that one. The attempts of other requests have no legs.
func (a *attempt) startLegs(req *http.Request) error {
	if !a.Terms.Parted {
		return nil
	}
	d := a.d
	l := &legs{decode: a, done: make(chan struct{}), client: req.Context()}
	a.legs = l
	if h := d.parting.handed; h.serves(time.Now()) && h.prefill.Worker.Engine().Pairs(a.Worker.Engine(), d.plan.Name) {
		close(l.done)
		l.prefill, l.leg.Handed = h.prefill, h.params
		l.handedOver.Store(time.Now().UnixNano())
		return nil
	}
	d.parting.handed = nil
	if err := l.seatPrefill(req.Context()); err != nil {
		close(l.done)
		return err
	}
	l.describe()
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(req.Context()))
	stop := context.AfterFunc(req.Context(), func() { l.cancel(errClientLeft) })
	call := l.request(req)
	if l.prefill.Worker.Engine().Together() {
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
	apart := d.parting.apart
	apart.Time, apart.Cost, apart.Booked = 0, 0, 0 // the prompt is there
	keeps := l.prefill.Worker.Engine().Keeps()
	d.parting.handed = &handed{prefill: l.prefill, apart: apart, params: l.leg.Handed, until: time.Now().Add(keeps)}
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

// seatPrefill finds a seat for the prefill leg, on the worker that the choice counts on if that
// is still free.
func (l *legs) seatPrefill(ctx context.Context) error {
	d := l.decode.d
	want, offers, p := d.prefillWants(), d.offers, &attempt{d: d}
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
		return &legError{legPrefill, err, true}
	}
	l.prefill = p
	p.reason = d.reasonOf(false, &p.Terms)
	p.log()
	d.trace.selected(p)
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
	e := p.Worker.Engine()
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never fails
	ranks := p.Worker.Ranks()
	room := binary.LittleEndian.Uint64(random[:]) >> 2
	l.leg = engine.Leg{
		ID: "kvr-" + hex.EncodeToString(random[:]), Port: e.Info.TransferPort, Rank: p.Target.Rank, Ranks: ranks,
		Room: room - room%uint64(ranks) + uint64(p.Target.Rank), // SGLang finds the rank by it
	}
	if l.leg.Port == 0 {
		l.leg.Port = engine.DefaultTransferPort
	}
	if host, _, err := net.SplitHostPort(p.Worker.Dial); err == nil {
		l.leg.Host = host
	}
}

// request returns the request of the prefill leg.
func (l *legs) request(req *http.Request) *http.Request {
	d, p, leg := l.decode.d, l.prefill, l.leg
	leg.Prefill = true
	r := EngineRequest{Pool: d.Pool, Plan: d.plan, Body: d.Body, Worker: p.Worker, Target: p.Target, Leg: &leg, shared: true}
	out := *d.trace.carry(r.Build(req))
	u := *out.URL // the transport changes it, and that of the decode leg
	out.URL = &u
	return &out
}

// run makes the prefill leg. It ends its seat, and reports what the leg has shown of its worker.
func (l *legs) run(req *http.Request) (err error) {
	defer close(l.done)
	p, d := l.prefill, l.decode.d
	defer p.Leave(false, nil) // if nothing below has
	ended := d.trace.leg(spanPrefill, p)
	begun := time.Now()
	status, counts, err := l.call(req)
	t := time.Now()
	ended(err)
	d.PoolMetrics.leg(legPrefill, err, t.Sub(begun))
	if err != nil && l.ctx.Err() != nil {
		l.abort(p)
		return err
	}
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	l.broke = status == 0 && err != nil && !unconnected && !errors.Is(err, errLegSilent)
	d.Pool.Report(p.Worker, p.legOutcome(status, err))
	clients := status >= 400 && status < 500 && !retryable(status) && !workersFault(status)
	if err != nil {
		failed := &legError{legPrefill, fmt.Errorf("worker %s: %w", p.Worker.Dial, err), clients || errors.Is(err, errNotHanded)}
		if clients && p.Worker.Engine().Together() {
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
	d.Pool.Figures(p.Worker, d.plan.Model).Ended(pool.AttemptPrefilled, false)
	l.handedOver.Store(t.UnixNano())
	l.decode.HandedOver(t)
	return nil
}

// call sends the prefill leg, and reads its answer.
func (l *legs) call(req *http.Request) (status int, counts response.Counts, err error) {
	p, d := l.prefill, l.decode.d
	limit := p.patience()
	if most := time.Duration(d.Timeouts.FirstToken); most > 0 && d.plan.Request.Stream {
		limit = min(limit, most)
	}
	if p.Worker.Engine().Together() { // its answer comes after the transfer
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
		return 0, counts, err
	}
	defer resp.Body.Close()
	response.Unpack(resp)
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxHandedOver+1))
	switch {
	case err != nil:
		return 0, counts, err
	case resp.StatusCode >= 300:
		return resp.StatusCode, counts, fmt.Errorf("status %s", resp.Status)
	case len(data) > maxHandedOver:
		return resp.StatusCode, counts, errNotHanded
	}
	answer := d.plan.Request.NewAnswer(false)
	answer.Write(data)
	answer.Finish()
	counts.Prompt, counts.Completion, counts.Cached = answer.Usage()
	if e := p.Worker.Engine(); answer.Failed() || !e.Handed(data, &l.leg) {
		d.Pool.Incidents.Raise(time.Now(), incidentNotHanded, d.Pool.Logger)
		return resp.StatusCode, counts, errNotHanded
	}
	return resp.StatusCode, counts, nil
}

// patience returns how long a leg of the attempt may be silent. The forecast is far off until the
// router has learned how fast the workers are, so a slow one has some time.
func (a *attempt) patience() time.Duration {
	const slowest = 2 * time.Millisecond // a token
	predicted := 4 * time.Duration(a.Terms.TTFT()*float64(time.Millisecond))
	return legPatience + max(predicted, time.Duration(a.Tokens)*slowest)
}

// legOutcome returns what the prefill leg has shown of its worker.
func (a *attempt) legOutcome(status int, err error) pool.Outcome {
	switch {
	case err == nil:
		return a.good()
	case errors.Is(err, errLegSilent):
		a.Worker.AskAgain()
		return pool.Outcome{} // it may be slow
	case status == 0:
		return a.failureOutcome(err)
	case retryable(status):
		return a.shows(pool.OutcomeBusy, err.Error())
	case workersFault(status):
		return a.errored(err.Error(), status >= 500)
	}
	return a.shows(pool.OutcomeAnswered, "")
}

// learn records the counts of the prompt in the index, the model's ratios and the metrics.
func (l *legs) learn(c response.Counts) {
	p, m := l.prefill, l.decode.d.PoolMetrics
	o := &delivery{d: p.d, attempt: p}
	o.Counts = c
	kind := discovery.ReportKind{API: p.d.plan.API.Name()}
	cached := discovery.Of(p.Worker).CachedTokens(kind, c.Cached)
	if c.Prompt <= 0 {
		return
	}
	o.count(cached)
	if cached >= 0 {
		m.reportedHits.Observe(float64(cached) / float64(c.Prompt))
		discovery.Of(p.Worker).Hits.Reported(cached, c.Prompt)
	}
	o.verify(cached)
}

// prefilled returns when the prefill leg had its answer, the zero time if it has none yet.
func (l *legs) prefilled() (t time.Time) {
	if n := l.handedOver.Load(); n != 0 {
		t = time.Unix(0, n)
	}
	return t
}

// computes returns the attempt whose worker computes the prompt.
func (a *attempt) computes() *attempt {
	if a.legs != nil && a.legs.prefill != nil {
		return a.legs.prefill
	}
	return a
}

// detach returns a context for the decode leg that does not end with the client's. If the client
// leaves, clientLeft ends it.
func (l *legs) detach(ctx context.Context) context.Context {
	if l == nil {
		return ctx
	}
	return context.WithoutCancel(ctx)
}

// watch begins the decode leg, which end ends. If the client leaves, the leg goes on until its
// worker has the prompt: blocks that nobody fetches would stay in the prefill worker's memory.
func (l *legs) watch(end context.CancelCauseFunc) {
	if l == nil {
		return
	}
	l.span = l.decode.d.trace.leg(spanDecode, l.decode)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end = end; l.failed != nil {
		end(l.failed)
	}
	l.forget = context.AfterFunc(l.client, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.fetched {
			end(errClientLeft)
			return
		}
		l.gone = time.AfterFunc(fetchTime, func() { end(errClientLeft) })
	})
}

// limit returns how long the first token of a stream may take. timeout is the operator's limit, 0
// if there is none.
func (l *legs) limit(timeout time.Duration) time.Duration {
	if l == nil {
		return timeout
	}
	own := max(l.decode.patience(), l.prefill.patience())
	if timeout > 0 {
		return min(timeout, own)
	}
	return own
}

// arrived records that the decode leg has its header, or failed before it. It returns the error of
// the attempt. ctx is the leg's. A stream has the prompt with its first token only.
func (l *legs) arrived(ctx context.Context, streams bool, err error) error {
	if l == nil {
		return err
	}
	if err != nil && context.Cause(ctx) != nil {
		return context.Cause(ctx) // such as the failure of the prefill leg
	}
	if err == nil && !streams {
		l.got()
	}
	return err
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
func (a *attempt) Leave(computed bool, answer *kvscore.Answer) {
	if a.legs != nil && !a.Left() {
		a.legs.leave()
	}
	a.Seat.Leave(computed, answer)
}

// leave ends the legs with their attempt.
func (l *legs) leave() {
	if l.cancel != nil {
		l.cancel(errClientLeft)
	}
	<-l.done
	if l.forget == nil {
		return // the decode leg has not begun
	}
	l.forget()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone != nil {
		l.gone.Stop()
	}
	a, err := l.decode, error(nil)
	switch o := a.d.answer; {
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
	a.d.PoolMetrics.leg(legDecode, err, time.Since(a.Begun))
}

// abort ends a leg in its engine, if the end of the connection does not.
func (l *legs) abort(a *attempt) {
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
