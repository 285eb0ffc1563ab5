package handler

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const (
	// longestSpeculative is how long one may take: by then the next turn has
	// come, or the worker has better things to do.
	longestSpeculative = 30 * time.Second
	// busyRequests and busyPrefill are what a target may have to do at most for
	// one to begin there: requests under way, its own not counted, and tokens
	// that are booked and not computed. A step of an engine takes some 2048
	// tokens and more; with a quarter of that booked, most of it is free.
	busyRequests, busyPrefill = 8, 512
	// maxBeside is how many tokens are to be computed at most beside the answers
	// of others: that is about one step.
	maxBeside = 2048
	// speculativePriority is below any that a client gives.
	speculativePriority = math.MinInt32 + 1
	// maxSpeculativeAnswer is how much is read of its answer, in bytes.
	maxSpeculativeAnswer = 1 << 20
)

const incidentSpeculative = "speculative prefill without success"

// speculation is what a client asked for with speculative_prefill: once its turn
// has ended well, the worker that answered computes what the next turn certainly
// begins with. That is a request of the router's own, with one token for an
// answer.
type speculation struct {
	d        *dispatcher
	pool     *pool
	session  string // of the turn, empty if it has none
	turn     *kvscore.Request
	size     int64 // bytes that are kept for it
	worker   *worker
	target   kvscore.Target
	upstream *reverseproxy.Upstream

	// set when it begins
	plan   *plan // of the turn
	body   *replay
	sent   *http.Request // the turn's
	text   []byte        // of its answer, as JSON
	blocks []uint64      // of prompt and answer
	past   float32       // blocks that these go on behind the last one
	tokens int64
	behind int64 // of them the answer's, which may have to be computed
	ctx    context.Context
	cancel context.CancelFunc

	// guarded by the lock of speculations
	over    string // what became of it, empty while it goes on
	booking *booking
}

// booking is what one takes of its worker.
type booking struct {
	once  sync.Once
	lease *kvscore.Lease
	slot  func() // gives it back
}

// end gives it back, once.
func (b *booking) end(computed bool) {
	b.once.Do(func() {
		b.lease.End(computed, nil)
		b.slot()
	})
}

// foresee keeps what a speculative prefill needs, if the client asked for one and
// an answer begins that it may follow.
func (rt *route) foresee(resp *http.Response) {
	p := rt.plan
	if !p.ext.AgentHints.SpeculativePrefill.Value || rt.attempt.worker.isDynamo(rt.pool) {
		return // a Dynamo is told, and does it itself
	}
	if rt.next != nil { // of an answer that the operator has tried again
		rt.next.end(speculativeUnfit)
		rt.next = nil
	}
	a := rt.attempt
	s := &speculation{
		d: rt.dispatcher, pool: rt.pool, session: p.session.key, turn: &p.score, worker: a.worker, target: a.target, upstream: rt.last,
		size: maxKeptText,
	}
	switch {
	case !rt.speculative:
		s.count(speculativeOff)
		return
	case p.request == nil || !p.request.Continues() || p.session.last || p.ext.TokenCount > 0 || resp.StatusCode != http.StatusOK || compressed(resp.Header) || rt.body == nil:
		s.count(speculativeUnfit)
		return
	}
	if s.size += rt.body.size; !rt.pool.speculations.expect(s) {
		s.count(speculativeMemory)
		return
	}
	rt.next = s
}

// speculate begins the speculative prefill that was foreseen, if the turn has
// ended well.
func (rt *route) speculate(outcome string) {
	s := rt.next
	if s == nil {
		return
	}
	rt.next = nil
	if o := rt.answer; outcome == outcomeOK && o.computed() && o.reader != nil {
		s.text = o.reader.Text()
	}
	if s.text == nil || rt.body == nil || rt.sent == nil {
		s.end(speculativeUnfit)
		return
	}
	s.plan, s.sent = rt.plan, rt.sent
	s.blocks, s.past, s.behind = s.chain()
	s.tokens = s.plan.score.Tokens + s.behind
	s.ctx, s.cancel = context.WithTimeout(s.d.ctx, longestSpeculative)
	if why := rt.pool.speculations.start(s); why != "" {
		s.cancel()
		s.end(why)
		return
	}
	s.body = rt.takeBody()
	go s.run()
}

// chain returns the blocks of prompt and answer, how far both go on behind the
// last of these, in blocks, and how many tokens the answer is.
func (s *speculation) chain() (blocks []uint64, past float32, tokens int64) {
	p := s.plan
	blocks, past = p.request.BlocksWith(s.text)
	more := float64(len(blocks)-len(p.request.Blocks)) + float64(past-p.request.Past)
	return blocks, past, int64(more*p.score.Weights.Mean(blocks[len(p.request.Blocks):])) + 1
}

// run computes the prefix.
func (s *speculation) run() {
	defer s.cancel()
	outcome := s.prefill()
	if b := s.booking; b != nil { // nobody else sets it
		b.end(outcome == speculativeOK)
	}
	s.body.done()
	s.end(outcome)
}

// end takes in that nothing more comes of it.
func (s *speculation) end(outcome string) {
	outcome = s.pool.speculations.end(s, outcome)
	s.count(outcome)
	if outcome == speculativeFailed || outcome == speculativeTimeout {
		s.pool.incidents.met(now(), incidentSpeculative, s.pool.logger)
	}
}

func (s *speculation) count(outcome string) {
	s.d.metrics.speculative.WithLabelValues(s.pool.name, outcome).Inc()
}

// stop ends it early. What it has booked is free when stop returns, so that the
// request for whose sake it ends finds the worker as it is without it.
func (s *speculation) stop() {
	s.cancel()
	s.pool.speculations.mu.Lock()
	b := s.booking
	s.pool.speculations.mu.Unlock()
	if b != nil {
		b.end(false)
	}
}

// prefill has the worker compute the prefix, and returns what became of that.
func (s *speculation) prefill() (outcome string) {
	t := now()
	switch {
	case s.d.ctx.Err() != nil:
		return speculativeStopped
	case s.isBusy(t):
		return speculativeBusy
	}
	p := s.next()
	if p == nil {
		return speculativeUnfit
	}
	if !s.book(t, p) {
		return speculativeBusy // or it was called off, which end knows
	}
	err := s.send(p)
	switch {
	case err == nil:
		return speculativeOK
	case s.d.ctx.Err() != nil:
		return speculativeStopped
	case errors.Is(s.ctx.Err(), context.DeadlineExceeded):
		return speculativeTimeout
	}
	return speculativeFailed
}

// isBusy tells whether the target has so much to do that this would cost others
// something, or should get nothing at all.
func (s *speculation) isBusy(t time.Time) bool {
	w := s.worker
	load, known := s.pool.scheduler.Load(t, s.target)
	limit := w.slots.limit.Load()
	return !known || load.Requests > busyRequests || load.PrefillTokens > busyPrefill ||
		load.Requests > 0 && s.behind > maxBeside ||
		limit > 0 && 2*w.slots.running.Load() >= limit || s.pool.queue.length.Load() > 0 ||
		w.draining() || !w.health.available(t) || w.flow.hangs() || !available(s.upstream)
}

// next returns the plan of the request that computes the prefix, nil if there can
// be none. Its body takes the place of the turn's, which is let go of.
func (s *speculation) next() *plan {
	turn := s.body
	whole := turn.parts[0]
	if len(turn.parts) > 1 {
		whole = slices.Concat(turn.parts...)
	}
	b := newBuffer(turn.size + int64(len(s.text)) + 256)
	body, ok := api.NextTurn(b.data[:0], whole, s.text)
	b.data = body
	b.count(&s.pool.bodies)
	s.body = replayOf(b, body)
	turn.done()
	if !ok {
		return nil
	}
	set := s.pool.settings.Load()
	req, err := api.Parse(s.plan.api, body, api.Options{TextBlock: set.textBlock, BlockSize: set.blockSize, Seed: s.pool.seed})
	if err != nil {
		return nil
	}
	// It does not compute in a client's name: what an engine lacks for it is
	// nothing that a client misses.
	p := &plan{api: s.plan.api, request: req, model: s.plan.model, ext: ownExt(s.plan.ext), speaks: true, grants: s.plan.grants}
	p.score = s.plan.score
	p.score.Blocks, p.score.Past, p.score.Tokens, p.score.Streamed = s.blocks, s.past, s.tokens, false
	return p
}

// ownExt returns what of a turn's nvext holds for the request that follows it:
// what decides which cache it is for. It is the least important of all.
func ownExt(e *nvext.Ext) *nvext.Ext {
	return &nvext.Ext{
		UseRawPrompt: e.UseRawPrompt, CacheSalt: e.CacheSalt, Tenant: e.Tenant, CacheTTL: e.CacheTTL,
		AgentHints: nvext.AgentHints{Priority: nvext.Some[int32](speculativePriority)},
	}
}

// book books it on its target, as a request that was sent there. It returns
// false if there is no room, or it was called off.
func (s *speculation) book(t time.Time, p *plan) bool {
	if !s.worker.slots.take() {
		return false
	}
	var sel kvscore.Selection
	_, lease := s.pool.scheduler.Select(t, &p.score, []kvscore.Target{s.target}, 0, nil, &sel)
	b := &booking{lease: lease, slot: func() { s.pool.freeSlot(s.worker) }}
	if !s.pool.speculations.hold(s, b) {
		b.end(false)
		return false
	}
	return true
}

// send makes the request, on a connection of its own, and only once. It returns
// nil if the worker has computed it.
func (s *speculation) send(p *plan) error {
	rt := &route{dispatcher: s.d, plan: p, body: s.body, attempt: &attempt{worker: s.worker, target: s.target}}
	rt.cut = nvext.Everything // what is cut out of the turn's body was counted with the turn
	req := rt.outgoing(ownRequest(s.ctx, s.sent), new(atomic.Int32))
	delete(req.Header, "Idempotency-Key")
	resp, err := s.d.client.Forward(req, s.worker.dial)
	if err != nil {
		return err
	}
	unpack(resp)
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New("status " + resp.Status)
	}
	answer := p.request.NewAnswer(false)
	if _, err := io.Copy(answerWriter{answer}, io.LimitReader(resp.Body, maxSpeculativeAnswer)); err != nil {
		return err
	}
	if answer.Finish(); answer.Failed() || !answer.Legible() {
		return errors.New("the answer is an error")
	}
	return nil
}

// answerWriter is an observer of an answer as a writer.
type answerWriter struct{ *api.Answer }

// Write implements io.Writer.
func (w answerWriter) Write(p []byte) (int, error) {
	w.Answer.Write(p)
	return len(p), nil
}

// ownRequest returns a request of the router's own that goes where a client's
// went, with what that said of who asks.
func ownRequest(ctx context.Context, of *http.Request) *http.Request {
	req := of.WithContext(ctx)
	u := *of.URL
	u.Scheme = "" // the transport knows it
	req.URL = &u
	req.Header = of.Header.Clone()
	for _, name := range []string{
		headerRequestID, "Idempotency-Key", "Content-Length", "Content-Encoding", "Content-Md5", "Digest", "Content-Digest",
		"Expect", "Trailer", "Upgrade", "Connection",
		"Traceparent", "Tracestate", "Baggage", engine.HeaderRank, // the adapter says it anew
	} {
		delete(req.Header, name)
	}
	req.Header.Set("Accept", "application/json")
	req.Trailer, req.TransferEncoding, req.Response, req.Cancel = nil, nil, nil, nil //nolint:staticcheck // whoever set it is gone
	return req
}
