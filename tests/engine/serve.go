package engine

import (
	"context"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
)

// maxBody is the longest body that is read, in bytes.
const maxBody = 256 << 20

type object = map[string]any

// exchange is one request and its answer.
type exchange struct {
	engine *Engine
	life   *life
	w      http.ResponseWriter
	r      *http.Request
	body   []byte
	record *Record
	late   Fault           // after the engine did what it was asked for
	fault  Fault           // in an inference
	ctx    context.Context // of an inference: also ends if that is aborted
	opened bool            // the header of a stream has been sent
	room   *room           // of an SGLang's prefill phase
}

// ServeHTTP answers as a vLLM does, or as the fault that is set says.
func (e *Engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	l := e.enter()
	if l == nil {
		canned.CloseConn(w, false)
		return
	}
	defer l.handlers.Done()
	// To its end: only then does the server notice that the client leaves.
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	x := &exchange{engine: e, life: l, w: w, r: r, body: body, record: &Record{
		Life: l.number, AtMS: ms(e.clock.now()), Method: r.Method, Path: r.URL.Path, Header: r.Header.Clone(),
		BodyBytes: len(body), Rank: -1, CachedTokens: -1, Outcome: Running,
	}}
	if e.cfg.KeepBodies {
		x.record.Body = body
	}
	x.record.Session = x.sessionNamed()
	e.journal.add(x.record)
	w.Header().Set(EngineHeader, e.cfg.Name)
	if err != nil {
		x.gone()
		return
	}
	path := r.URL.Path
	api := e.cfg.shape(path)
	inference := api != notInference
	f := e.faults.take(path, inference)
	if f.Late {
		x.late, f = f, Fault{}
	}
	switch {
	case x.fail(f):
	case !inference:
		x.surface()
	case r.Method != http.MethodPost:
		x.fail405()
	default:
		x.infer(api, f)
	}
}

// infer answers an inference request.
func (x *exchange) infer(s shape, f Fault) {
	ctx, cancel := context.WithCancel(x.r.Context())
	defer cancel()
	x.ctx, x.fault = ctx, f
	if !x.wakes() {
		return
	}
	c, aerr := x.engine.understand(s, x.body, x.r.Header)
	if aerr != nil {
		x.reject(aerr)
		return
	}
	if c.rank < 0 {
		c.rank = x.life.choose()
	}
	j := &job{Request: batch.Request{Drag: f.Factor}, each: c.stream, ready: make(chan struct{}, 1), progress: progress{cached: -1}}
	if !x.begin(c, j) {
		return
	}
	x.note(func(r *Record) { r.Rank, r.RankFrom, r.PromptTokens = c.rank, c.rankFrom, len(c.prompt.Tokens) })
	if x.engine.cfg.Flavour == SGLang {
		x.life.abortable.Store(c.id, cancel)
		defer x.life.abortable.Delete(c.id)
	}
	k := x.life.ranks[c.rank]
	if !x.beginPhase(c, j, k) {
		return
	}
	k.submit(j)
	if c.stream {
		x.stream(c, k, j)
	} else {
		x.whole(c, k, j)
	}
}

// await waits for news of a job. It returns false when there will be none: the
// client left or the engine died. Then the job is aborted and noted.
func (x *exchange) await(k *rank, j *job) (progress, bool) {
	select {
	case <-j.ready:
		return j.look(), true
	case <-x.ctx.Done():
	case <-x.life.dead:
		canned.CloseConn(x.w, false)
	}
	x.leave(k, j)
	return progress{}, false
}

// leave ends a job whose answer reaches nobody.
func (x *exchange) leave(k *rank, j *job) {
	aborted := k.abort(j)
	x.outcome(j)
	switch {
	case !aborted:
		x.strand(k, j)
		x.finish(Finished)
	case x.life.over.Load():
		x.gone()
	default:
		x.cutOff()
	}
}

// gone notes that the client left, or that it lost its engine.
func (x *exchange) gone() {
	if x.life.over.Load() {
		x.finish(Broken)
	} else {
		x.finish(Aborted)
	}
}

// stream answers with server-sent events. The header goes out at once, as vLLM's
// does.
func (x *exchange) stream(c *call, k *rank, j *job) {
	ctl := http.NewResponseController(x.w)
	if !x.openStream() {
		x.leave(k, j)
		return
	}
	var events []canned.Event // that were not sent
	var buf []byte
	for sent := 0; ; {
		p, ok := x.await(k, j)
		if !ok || p.done && !x.endPhase(c, k, j) {
			return
		}
		if sent == 0 {
			events = apis[c.shape].Events(x.engine.answerOf(c, p.cached))
		}
		for buf = buf[:0]; len(events) > 0 && (p.done || sent < p.tokens); events = events[1:] {
			if events[0].Word {
				sent++
			}
			buf = events[0].Append(buf)
		}
		if p.done {
			if apis[c.shape].Done {
				buf = append(buf, "data: [DONE]\n\n"...)
			}
			x.outcome(j) // before the client knows of the end
			x.finish(Finished)
		}
		_, err := x.w.Write(buf)
		switch {
		case p.done:
			return
		case err != nil || ctl.Flush() != nil:
			x.leave(k, j)
			return
		}
	}
}

// answerOf returns what the answer to a call is made of.
func (e *Engine) answerOf(c *call, cached int) *canned.Answer {
	n := len(c.prompt.Tokens)
	a := &canned.Answer{
		ID: c.id, Model: c.model, Begun: time.Now().Unix(), Reasoning: e.cfg.ReasoningTokens, Reason: c.reason,
		Prompt: n, Cached: cached, Created: max(0, n/e.cfg.BlockSize*e.cfg.BlockSize-cached), Completion: len(c.answer),
		Usage:  c.usage,
		Engine: &canned.OfEngine{PromptIDs: c.prompt.Tokens, IDs: c.answer, ReturnIDs: c.tokenIDs, InWhole: c.inWhole, InChoice: c.inChoice},
	}
	for _, token := range c.answer {
		a.Pieces = append(a.Pieces, strings.TrimSuffix(tokenText(token), specials[endToken])) // the end token has no text
	}
	if e.cfg.Flavour == LlamaCpp { // also in a stream without usage
		a.Engine.Timings = object{"cache_n": cached, "prompt_n": n - cached, "predicted_n": len(c.answer)}
	}
	return a
}

// openStream sends the header of a stream, once. It returns false if the client is gone.
func (x *exchange) openStream() bool {
	if !x.opened {
		x.opened = true
		x.header(http.StatusOK, "text/event-stream; charset=utf-8")
		return http.NewResponseController(x.w).Flush() == nil
	}
	return true
}

// whole answers in one piece.
func (x *exchange) whole(c *call, k *rank, j *job) {
	p, ok := x.await(k, j)
	if !ok || !x.endPhase(c, k, j) {
		return
	}
	x.outcome(j)
	x.finish(Finished)
	x.value(apis[c.shape].Whole(x.engine.answerOf(c, p.cached)))
}

// header sends the answer's header.
func (x *exchange) header(status int, contentType string) {
	x.note(func(r *Record) { r.Status = status })
	x.w.Header().Set("Content-Type", contentType)
	x.w.WriteHeader(status)
}

func (x *exchange) note(change func(*Record)) { x.engine.journal.note(x.record, change) }

// outcome notes how far a job came.
func (x *exchange) outcome(j *job) {
	p := j.look()
	x.note(func(r *Record) {
		r.CachedTokens, r.AnswerTokens = p.cached, p.tokens
		r.FirstTokenMS = ms(p.first)
	})
}

// finish notes what became of a request.
func (x *exchange) finish(o Outcome) {
	x.note(func(r *Record) { r.Outcome = o })
}
