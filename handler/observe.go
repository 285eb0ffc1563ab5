package handler

import (
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"go.uber.org/zap"
)

// observer is the body of an answer on its way to the client. It changes no
// byte.
type observer struct {
	rt      *route
	attempt *attempt
	body    io.ReadCloser
	reader  *api.Answer // nil where the answer is not that of an inference
	status  int
	stream  bool

	first     time.Time // the first token came
	last      time.Time // the latest did
	refreshed time.Time // the session's binding was
	ended     bool      // the answer came to its end
	broken    error     // it broke off
	epilogue  []byte    // still to be sent to the client then
}

// observe puts an observer between an answer and the client.
func (rt *route) observe(req *http.Request, resp *http.Response) {
	o := &observer{rt: rt, attempt: rt.attempt, body: resp.Body, status: resp.StatusCode}
	rt.answer = o
	if rt.plan.request != nil && resp.StatusCode < 300 {
		o.stream = strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream")
		o.reader = rt.plan.request.NewAnswer(o.stream)
		o.refreshed = now()
	}
	if !o.stream {
		o.attempt.lease.FirstToken(now()) // whatever it was, it is computed
	}
	if req.Method != http.MethodHead && resp.Body != http.NoBody {
		resp.Body = o
	} else {
		o.ended = true
	}
}

// Read implements io.Reader.
func (o *observer) Read(p []byte) (int, error) {
	if o.broken != nil {
		n := copy(p, o.epilogue)
		if o.epilogue = o.epilogue[n:]; len(o.epilogue) > 0 {
			return n, nil
		}
		return n, o.broken
	}
	n, err := o.body.Read(p)
	if n > 0 && o.reader != nil {
		o.feed(p[:n])
	}
	switch {
	case err == nil:
	case errors.Is(err, io.EOF):
		o.end()
	default:
		o.broken = err
		if o.stream && !isCanceled(err) {
			// the client must be told; it will not see the end
			o.epilogue = brokenStreamEvent
			return n, nil
		}
	}
	return n, err
}

// Close implements io.Closer.
func (o *observer) Close() error { return o.body.Close() }

// feed reads along.
func (o *observer) feed(p []byte) {
	before := o.reader.Chunks()
	o.reader.Write(p)
	chunks := o.reader.Chunks()
	if !o.stream || chunks == before {
		return
	}
	t := now()
	if o.first.IsZero() {
		o.first = t
		o.attempt.lease.FirstToken(t)
		o.rt.h.metrics.ttft.WithLabelValues(o.rt.pool.name).Observe(t.Sub(o.rt.start).Seconds())
	}
	o.last = t
	o.attempt.lease.Output(t, int64(chunks))
	if o.rt.plan.session != "" && t.Sub(o.refreshed) > o.rt.pool.settings.Load().ttl/4 {
		o.refreshed = t
		o.rt.pool.sessions.Get(o.rt.plan.session) // a long answer keeps its session alive
	}
}

// end takes in that the answer has come whole.
func (o *observer) end() {
	if o.ended {
		return
	}
	o.ended = true
	if o.reader == nil {
		return
	}
	o.reader.Finish()
	prompt, completion, cached := o.reader.Usage()
	m, pool := o.rt.h.metrics, o.rt.pool.name
	if req := o.rt.plan.request; prompt > 0 {
		m.inputTokens.WithLabelValues(pool).Observe(float64(prompt))
		if req.Kind == api.Text && req.Media == 0 {
			o.rt.pool.ratios.Learn(req.Model, req.Bytes, prompt)
		}
		if cached >= 0 {
			m.reportedHits.WithLabelValues(pool).Observe(float64(cached) / float64(prompt))
		}
	}
	if completion >= 0 {
		m.outputTokens.WithLabelValues(pool).Observe(float64(completion))
	}
	if cached >= 0 {
		o.rt.repl.Set("http.kv_router.cached_tokens", cached)
	}
	if n := o.reader.Chunks(); n > 1 {
		m.itl.WithLabelValues(pool).Observe(o.last.Sub(o.first).Seconds() / float64(n-1))
	}
}

// computed tells whether the worker has certainly computed the prompt.
func (o *observer) computed() bool {
	if o == nil || o.status >= 300 {
		return false
	}
	return o.ended || !o.first.IsZero()
}

// prediction returns the blocks of prompt and answer, nil if they are not
// known.
func (o *observer) prediction() []uint64 {
	if o.reader == nil || !o.ended {
		return nil
	}
	return o.reader.Prediction()
}

// commit binds the session to the target that answers it, or keeps it there.
func (rt *route) commit() {
	if rt.plan.session == "" || rt.plan.request == nil {
		return
	}
	target := rt.attempt.lease.Target()
	if rt.bound != 0 && rt.seenAt == target {
		if b, ok := rt.pool.sessions.Get(rt.plan.session); ok {
			rt.bound, rt.seenAt = b.Version, b.Target
			return
		}
		rt.bound = 0 // it has just expired
	}
	b, _, err := rt.pool.sessions.CompareAndSwap(rt.plan.session, rt.bound, target, rt.pool.settings.Load().ttl, affinity.RouterOnly)
	if err != nil {
		rt.fallBack(fallbackUnbound) // the store is full of others' sessions
		return
	}
	rt.bound, rt.seenAt = b.Version, b.Target
}

// finish ends everything that the request has begun. It runs deferred, also
// when the proxy aborts with a panic.
func (rt *route) finish() {
	if rt.attempt == nil {
		rt.count(outcomeUnavailable)
		return
	}
	rt.release()
	o := rt.answer
	rt.endAttempt(o.computed())
	if o.computed() && rt.plan.session != "" {
		rt.pool.sessions.Get(rt.plan.session) // the time to live begins at the end
	}
	outcome := rt.outcome()
	if outcome == outcomeBroken {
		rt.rateDown(rt.attempt, "stream broke: "+o.broken.Error(), 0)
	}
	rt.count(outcome)
	if rt.plan.request != nil && rt.plan.score.Tokens > 0 {
		hits := float64(rt.attempt.terms.OverlapTokens) / float64(rt.plan.score.Tokens)
		rt.h.metrics.predictedHits.WithLabelValues(rt.pool.name).Observe(hits)
	}
	rt.log(outcome)
}

// outcome says what became of the request.
func (rt *route) outcome() string {
	o := rt.answer
	switch {
	case o == nil && rt.err == nil && rt.returned:
		return outcomeClientGone // or an upgraded connection, at its end
	case o == nil:
		return outcomeUnavailable
	case o.broken != nil && !isCanceled(o.broken):
		return outcomeBroken
	case !o.ended && (!rt.returned || o.broken != nil):
		return outcomeClientGone
	case o.status >= 400 || (o.reader != nil && o.reader.Failed()):
		return outcomeEngineError
	}
	return outcomeOK
}

func (rt *route) count(outcome string) {
	rt.h.metrics.requests.WithLabelValues(rt.pool.name, outcome).Inc()
}

// log adds the fields of the access log.
func (rt *route) log(outcome string) {
	if rt.extra == nil {
		return
	}
	a := rt.attempt
	rt.extra.Set(zap.Object("kv_router", logFields{
		worker: a.worker.target.Worker, upstream: a.worker.dial, rank: a.worker.target.Rank,
		reason: a.reason, outcome: outcome, attempts: len(rt.tried),
		overlap: int64(a.terms.OverlapBlocks), predicted: a.terms.OverlapTokens, prompt: rt.plan.score.Tokens,
		answer: rt.answer,
	}))
}

func routingMessage(a *attempt) string {
	return "[ROUTING] Best: worker_" + strconv.FormatUint(a.worker.target.Worker, 10) +
		" dp_rank=" + strconv.FormatUint(uint64(a.worker.target.Rank), 10) +
		" with " + strconv.FormatInt(int64(a.terms.OverlapBlocks), 10) +
		"/" + strconv.FormatInt(int64(a.terms.RequestBlocks), 10) + " blocks overlap"
}
