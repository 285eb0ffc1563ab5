package handler

import (
	"context"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"go.uber.org/zap"
)

const (
	// tokenizeTimeout is how long an engine may take to tell a prompt's token ids,
	// in all: some 15 ms for 8,000 tokens, where it is not busy otherwise.
	tokenizeTimeout = 2 * time.Second
	// maxTokenized is the longest answer that is read, in bytes: two million ids
	// and more. That to a short prompt may have these per byte of the request's body,
	// for its ids, and leastTokenized besides: templates and what renderers repeat.
	maxTokenized, leastTokenized, tokenizedPerByte = 16 << 20, 256 << 10, 10
	// maxAsking is how many engines of a pool are asked at a time.
	maxAsking = 64
)

// askTokens asks the worker that a query is told for the prompt's token ids, and
// returns them as JSON; nil if it does not tell them, which is counted. That is a
// question of the router's own: it is not booked, takes no slot, and marks nobody
// who does not answer.
func (rt *route) askTokens(r *http.Request, c *chosenView) (ids []byte) {
	p := rt.plan
	q := rt.question()
	if q == nil {
		rt.fallBack(fallbackUntokenized)
		return nil
	}
	size := p.body.size
	most := min(maxTokenized, leastTokenized+tokenizedPerByte*size)
	room := 2*size + 3*most // as it comes, as numbers, and as it is told
	held := rt.pool.bodies.Add(room)
	defer rt.pool.bodies.Add(-room)
	asking := rt.pool.asking.Add(1)
	defer rt.pool.asking.Add(-1)
	if held > maxBodies || asking > maxAsking {
		rt.fallBack(fallbackUntokenized)
		return nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), tokenizeTimeout)
	defer cancel()
	w := rt.pool.peek(c.Dial)
	e := rt.pool.engineOf(w)
	ids = e.Tokenize(q, func(path string, body []byte) (int, []byte) {
		return rt.h.postOwn(ctx, w, path, body, r.Header["Authorization"], most)
	})
	if ids == nil {
		rt.fallBack(fallbackUntokenized)
	}
	return ids
}

// question returns what an engine is to be asked, nil if the prompt is none that
// an engine can tell the ids of.
func (rt *route) question() *engine.Question {
	p := rt.plan
	if p.request.Kind != api.Text || p.request.Media > 0 || p.body.buffer == nil {
		return nil
	}
	body := p.body.buffer.data
	q := &engine.Question{
		API: p.api.Name(), Body: p.request.Editor(body), Text: p.request.PromptText(body), Raw: p.ext.UseRawPrompt.Value,
	}
	if q.Body == nil {
		return nil
	}
	return q
}

// postOwn makes a POST request of the router's own to a worker, for a client with
// that authorization, and returns the status and the body of the answer. The
// status is 0 if there is no answer, or if it is longer than most bytes.
func (h *Handler) postOwn(ctx context.Context, w *worker, path string, body []byte, authorization []string, most int64) (status int, answer []byte) {
	status, answer, err := h.call(ctx, w, path, body, authorization, most+1)
	if c := h.logger.Check(zap.DebugLevel, "worker was asked for token ids"); c != nil {
		c.Write(zap.String("upstream", w.dial), zap.String("path", path), zap.Int("status", status), zap.Int("bytes", len(answer)), zap.Error(err))
	}
	if err != nil || int64(len(answer)) > most {
		return 0, nil
	}
	return status, answer
}

// explainTokens explains a query anew whose prompt's token ids an engine has
// told. Who has sent these before, in a second stage, is known by them and not by
// the text: what counts is the prompt of which more is cached.
func (rt *route) explainTokens(r *http.Request, e *explanation, ids []byte) *explanation {
	if ids == nil {
		return e
	}
	set := rt.pool.settings.Load()
	p, req := *rt.plan, *rt.plan.request
	if !req.Give(ids, api.Options{TextBlock: set.textBlock, BlockSize: set.blockSize, Seed: rt.pool.seed}) {
		return e
	}
	p.request, p.body = &req, nil
	p.identify(&req, set, &rt.pool.ratios)
	if by := rt.h.explainPlan(r, &p); by.Chosen != nil && by.overlap() > e.overlap() {
		return by
	}
	return e
}

// overlap returns the most tokens of the prompt that a candidate holds.
func (e *explanation) overlap() (most int64) {
	for i := range e.Candidates {
		most = max(most, e.Candidates[i].OverlapTokens)
	}
	return most
}
