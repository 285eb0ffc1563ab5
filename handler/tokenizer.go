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
func (x *explainer) askTokens(r *http.Request, p *plan, c *chosenView) (ids []byte) {
	q := p.question()
	if q == nil {
		x.fallBack(fallbackUntokenized)
		return nil
	}
	size := p.body.Size
	most := min(maxTokenized, leastTokenized+tokenizedPerByte*size)
	room := 2*size + 3*most // as it comes, as numbers, and as it is told
	within, release := x.pool.memory.Reserve(room)
	defer release()
	asking := x.pool.asking.Add(1)
	defer x.pool.asking.Add(-1)
	if !within || asking > maxAsking {
		x.fallBack(fallbackUntokenized)
		return nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), tokenizeTimeout)
	defer cancel()
	w := x.pool.peek(c.Dial)
	e := x.pool.engineOf(w)
	ids = e.Tokenize(q, func(path string, body []byte) (int, []byte) {
		return x.postOwn(ctx, w, path, body, r.Header["Authorization"], most)
	})
	if ids == nil {
		x.fallBack(fallbackUntokenized)
	}
	return ids
}

// question returns what an engine is to be asked, nil if the prompt is none that
// an engine can tell the ids of.
func (p *plan) question() *engine.Question {
	if p.request.Kind != api.Text || p.request.Media > 0 || p.body.Buffer == nil {
		return nil
	}
	body := p.body.Buffer.Data
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
func (x *explainer) postOwn(ctx context.Context, w *worker, path string, body []byte, authorization []string, most int64) (int, []byte) {
	status, answer, err := x.client.Fetch(ctx, w.dial, http.MethodPost, path, body, authorization, most)
	if c := x.logger.Check(zap.DebugLevel, "worker was asked for token ids"); c != nil {
		c.Write(zap.String("upstream", w.dial), zap.String("path", path), zap.Int("status", status), zap.Int("bytes", len(answer)), zap.Error(err))
	}
	if err != nil {
		return 0, nil
	}
	return status, answer
}

// explainTokens explains a query anew whose prompt's token ids an engine has
// told. Who has sent these before, in a second stage, is known by them and not by
// the text: what counts is the prompt of which more is cached.
func (x *explainer) explainTokens(r *http.Request, planned *plan, e *explanation, ids []byte) *explanation {
	if ids == nil {
		return e
	}
	p := x.reader.withTokens(planned, ids)
	if p == nil {
		return e
	}
	if by := x.explainPlan(r, p); by.Chosen != nil && by.overlap() > e.overlap() {
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
