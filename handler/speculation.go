package handler

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
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

// speculation is a speculative prefill that a client asked for: once its turn has
// ended well, the worker that answered computes what the next turn certainly begins
// with. That is a request of the router's own, for one token.
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
	body   *body.Replay
	sent   *http.Request // the turn's
	text   []byte        // of its answer, as JSON
	blocks []uint64      // of prompt and answer
	past   float32       // blocks that these go on behind the last one
	tokens int64
	behind int64 // of them the answer's, which may have to be computed
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{} // closed when nothing is booked any more

	over string // its outcome, empty while it goes on; under the lock of speculations
}

// foresee keeps what a speculative prefill needs when an answer begins, if the client
// asked for one.
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
	case p.request == nil || !p.request.Continues() || p.session.last || p.ext.TokenCount > 0 || resp.StatusCode != http.StatusOK || body.Compressed(resp.Header) || rt.body == nil:
		s.count(speculativeUnfit)
		return
	}
	if s.size += rt.body.Size; !rt.pool.speculations.expect(s) {
		s.count(speculativeMemory)
		return
	}
	rt.next = s
}

// speculate starts the speculative prefill that was foreseen, if the turn has ended
// well.
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
	s.done = make(chan struct{})
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
	defer close(s.done)
	defer s.cancel()
	outcome := s.prefill()
	s.body.Done()
	s.end(outcome)
}

// end records the outcome.
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

// prefill has the worker compute the prefix, and returns the outcome.
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
	if !s.worker.slots.take() {
		return speculativeBusy
	}
	var sel kvscore.Selection
	_, lease := s.pool.scheduler.Select(t, &p.score, []kvscore.Target{s.target}, 0, nil, &sel)
	err := s.send(p)
	lease.End(err == nil, nil)
	s.pool.freeSlot(s.worker)
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

// isBusy tells whether the prefill would delay other requests on the target, or
// whether the target should get no requests.
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
// be none. Its body replaces the turn's.
func (s *speculation) next() *plan {
	turn := s.body
	whole := turn.Parts[0]
	if len(turn.Parts) > 1 {
		whole = slices.Concat(turn.Parts...)
	}
	b := body.NewBuffer(turn.Size + int64(len(s.text)) + 256)
	data, ok := api.NextTurn(b.Data[:0], whole, s.text)
	b.Data = data
	s.pool.memory.Count(b)
	s.body = body.NewReplay(b, data)
	turn.Done()
	if !ok {
		return nil
	}
	set := s.pool.settings.Load()
	req, err := api.Parse(s.plan.api, data, api.Options{TextBlock: set.textBlock, BlockSize: set.blockSize, Seed: s.pool.seed})
	if err != nil {
		return nil
	}
	// computes is not set: what the engine does not support is not counted.
	p := &plan{api: s.plan.api, request: req, model: s.plan.model, ext: ownExt(s.plan.ext), speaks: true, grants: s.plan.grants}
	p.score = s.plan.score
	p.score.Blocks, p.score.Past, p.score.Tokens, p.score.Streamed = s.blocks, s.past, s.tokens, false
	return p
}

// ownExt returns the fields of a turn's nvext that decide which cache a prompt is for,
// with the lowest priority.
func ownExt(e *nvext.Ext) *nvext.Ext {
	return &nvext.Ext{
		UseRawPrompt: e.UseRawPrompt, CacheSalt: e.CacheSalt, Tenant: e.Tenant, CacheTTL: e.CacheTTL,
		AgentHints: nvext.AgentHints{Priority: nvext.Some[int32](speculativePriority)},
	}
}

// send makes the request once, on a connection of its own. It returns nil if the
// worker has computed the prefix.
func (s *speculation) send(p *plan) error {
	rt := &route{dispatcher: s.d, plan: p, body: s.body, attempt: &attempt{stream: stream{worker: s.worker, target: s.target}}}
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

// answerWriter makes an api.Answer an io.Writer.
type answerWriter struct{ *api.Answer }

// Write implements io.Writer.
func (w answerWriter) Write(p []byte) (int, error) {
	w.Answer.Write(p)
	return len(p), nil
}

// ownRequest returns a request of the router's own that goes where a client's went,
// with the headers that say who asks.
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
