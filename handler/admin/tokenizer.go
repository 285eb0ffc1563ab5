package admin

import (
	"context"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
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
// returns them as JSON; nil if it does not tell them, which is counted. The question is
// not booked, takes no slot, and marks no worker that does not answer.
func (x *Explainer) askTokens(r *http.Request, p *plan.Plan, w *pool.Worker) (ids []byte) {
	q := questionOf(p)
	if q == nil {
		x.FallBack(dispatch.FallbackUntokenized)
		return nil
	}
	size := p.Body.Size
	most := min(maxTokenized, leastTokenized+tokenizedPerByte*size)
	room := 2*size + 3*most // as it comes, as numbers, and as it is told
	within, release := x.Pool.Memory.Reserve(room)
	defer release()
	asking := x.Pool.Asking.Add(1)
	defer x.Pool.Asking.Add(-1)
	if !within || asking > maxAsking {
		x.FallBack(dispatch.FallbackUntokenized)
		return nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), tokenizeTimeout)
	defer cancel()
	e := x.Pool.EngineOf(w)
	ids = e.Tokenize(q, func(path string, body []byte) (int, []byte) {
		return x.postOwn(ctx, w, path, body, r.Header["Authorization"], most)
	})
	if ids == nil {
		x.FallBack(dispatch.FallbackUntokenized)
	}
	return ids
}

// questionOf returns what an engine is asked, nil if no engine can tell the ids of the
// prompt.
func questionOf(p *plan.Plan) *engine.Question {
	if p.Request.Kind != api.Text || p.Request.Media > 0 || p.Body.Buffer == nil {
		return nil
	}
	body := p.Body.Buffer.Data
	q := &engine.Question{
		API: p.API.Name(), Body: p.Request.Editor(body), Text: p.Request.PromptText(body), Raw: p.Ext.UseRawPrompt.Value,
	}
	if q.Body == nil {
		return nil
	}
	return q
}

// postOwn makes a POST request of the router's own to a worker, for a client with
// that authorization, and returns the status and the body of the answer. The
// status is 0 if there is no answer, or if it is longer than most bytes.
func (x *Explainer) postOwn(ctx context.Context, w *pool.Worker, path string, body []byte, authorization []string, most int64) (int, []byte) {
	status, answer, err := x.Client.Fetch(ctx, w.Dial, http.MethodPost, path, body, authorization, most)
	if c := x.Logger.Check(zap.DebugLevel, "worker was asked for token ids"); c != nil {
		c.Write(zap.String("upstream", w.Dial), zap.String("path", path), zap.Int("status", status), zap.Int("bytes", len(answer)), zap.Error(err))
	}
	if err != nil {
		return 0, nil
	}
	return status, answer
}

// explainTokens makes the choice for a query again with the token ids that an engine has
// told. Requests that had these, in a second stage, are known by them and not by the
// text: the choice for the prompt of which more is cached counts.
func (x *Explainer) explainTokens(r *http.Request, planned *plan.Plan, c *dispatch.DryChoice, ids []byte) *dispatch.DryChoice {
	if ids == nil {
		return c
	}
	p := x.Reader.WithTokens(planned, ids)
	if p == nil {
		return c
	}
	if by := x.Dispatcher.Explain(r, p); by.Overlap() > c.Overlap() {
		return by
	}
	return c
}
