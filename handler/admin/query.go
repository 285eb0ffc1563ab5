package admin

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

var errNoQuery = errors.New(
	"nvext.annotations: the router cannot answer query_instance_id, because it cannot read the prompt of this request")

// AnswerQuery answers a client that asks where its request would go, with the worker
// and the prompt's token ids under nvext. In a second stage, the client names the
// worker. Nothing is booked, remembered or computed. If the request has no token ids,
// the chosen worker's engine is asked for them. Refusals are returned as such.
func (x *Explainer) AnswerQuery(w http.ResponseWriter, p *plan.Plan) error {
	if p.Request == nil {
		return &api.Refusal{
			API: plan.OrUnplanned(p.API), Status: http.StatusBadRequest, Code: api.CodeNVExt, Param: "nvext", Err: errNoQuery,
		}
	}
	c := x.Dispatcher.Explain(p)
	if c.Refused != nil {
		return c.Refused
	}
	if len(c.Candidates) == 0 {
		return errNoChoice
	}
	ids := tokenIDs(p)
	if ids == nil {
		ids = x.askTokens(p, c.Workers[c.Picked.Chosen])
		c = x.explainTokens(p, c, ids)
	}
	answer, err := x.encodeQuery(p, c, ids)
	if err != nil {
		return err
	}
	x.Dispatcher.Count(dispatch.OutcomeQuery)
	stream := p.Request.Stream
	p.Close() // the client may take its time to read
	kind := "application/json"
	if stream {
		kind = body.EventStream
		answer = fmt.Appendf(nil, "data: %s\n\ndata: [DONE]\n\n", answer)
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
	_, release := x.Dispatcher.Pool.Memory.Reserve(int64(len(answer)))
	defer release()
	_, err = w.Write(answer) //nolint:gosec // JSON, and said to be
	return err
}

var errNoChoice = errors.New("no worker was chosen")

// queryAnswer is the answer to a query. APIs without an object have no choices.
type queryAnswer struct {
	ID      string  `json:"id"`
	Object  string  `json:"object,omitempty"`
	Created int64   `json:"created"`
	Model   string  `json:"model"`
	Choices *[0]int `json:"choices,omitempty"`
	NVExt   struct {
		Workers  nvext.Workers   `json:"worker_id"`
		TokenIDs json.RawMessage `json:"token_ids,omitempty"`
		Explain  any             `json:"explain,omitempty"`
	} `json:"nvext"`
}

func (x *Explainer) encodeQuery(p *plan.Plan, c *dispatch.DryChoice, ids []byte) ([]byte, error) {
	prefill, decode := c.Prefill(), c.Candidates[c.Picked.Chosen].Target
	answer := queryAnswer{ID: "query-" + rand.Text(), Created: time.Now().Unix(), Model: p.Named()}
	answer.NVExt.Workers = nvext.Workers{
		PrefillWorker: prefill.Worker, PrefillRank: prefill.Rank, DecodeWorker: decode.Worker, DecodeRank: decode.Rank,
	}
	if answer.NVExt.TokenIDs = ids; p.Ext.QueryExplains() {
		answer.NVExt.Explain = x.view(p, c)
	}
	if object := p.Request.AnswerObject(); object != "" {
		answer.Object, answer.Choices = object, new([0]int)
	}
	return json.Marshal(answer)
}

func tokenIDs(p *plan.Plan) []byte {
	if p.Ext.TokenCount > 0 {
		return p.Ext.TokenData
	}
	if p.Body.Buffer == nil {
		return nil
	}
	ids, _ := nvext.IDs(p.Request.IDs(p.Body.Buffer.Data))
	return ids
}

const (
	// tokenizeTimeout is how long an engine may take to return a prompt's token ids,
	// in all. An idle engine needs some 15 ms for 8,000 tokens.
	tokenizeTimeout = 2 * time.Second
	// maxTokenized is the longest answer that is read, in bytes: two million ids and
	// more. A short prompt's may have leastTokenized, for templates, and
	// tokenizedPerByte per byte of the request's body.
	maxTokenized, leastTokenized, tokenizedPerByte = 16 << 20, 256 << 10, 10
	// maxAsking is how many engines of a pool are asked at a time.
	maxAsking = 64
)

// askTokens asks the chosen worker for the prompt's token ids, and returns them as JSON.
// It returns nil, and counts that, if the worker does not answer with them. The question
// is not booked, takes no slot, and never marks a worker down.
func (x *Explainer) askTokens(p *plan.Plan, w *worker.Worker) (ids []byte) {
	q := questionOf(p)
	if q == nil {
		x.Dispatcher.FallBack(dispatch.FallbackUntokenized)
		return nil
	}
	size := p.Body.Size
	most := min(maxTokenized, leastTokenized+tokenizedPerByte*size)
	room := 2*size + 3*most // as it comes, as numbers, and as it is answered
	within, release := x.Dispatcher.Pool.Memory.Reserve(room)
	defer release()
	asking := x.Dispatcher.Pool.Asking.Add(1)
	defer x.Dispatcher.Pool.Asking.Add(-1)
	if !within || asking > maxAsking {
		x.Dispatcher.FallBack(dispatch.FallbackUntokenized)
		return nil
	}
	ctx, cancel := context.WithTimeout(p.HTTP.Context(), tokenizeTimeout)
	defer cancel()
	if attempt.Renames(p, w) {
		attempt.SetModel(q.Body, p, w)
		if q.Body = rawjson.EditObject(q.Body.Apply()); q.Body == nil {
			return nil
		}
	}
	e := w.Engine()
	ids = e.Tokenize(q, x.Dispatcher.AskTokenizer(ctx, p, w, most))
	if ids == nil {
		x.Dispatcher.FallBack(dispatch.FallbackUntokenized)
	}
	return ids
}

// questionOf returns the question to an engine, nil if no engine can answer it.
func questionOf(p *plan.Plan) *engine.Question {
	if p.Request.Kind != api.Text || p.Request.Media > 0 || p.Body.Buffer == nil {
		return nil
	}
	data := p.Body.Buffer.Data
	editor := p.Request.Editor(data)
	if editor == nil {
		return nil
	}
	return &engine.Question{
		API: p.API.Name(), Body: editor, Text: p.Request.PromptText(data), Raw: p.Ext.UseRawPrompt.Value,
	}
}

// explainTokens repeats the choice with the token ids of an engine, and returns the
// choice with more overlap. Second-stage requests are known by ids, not by text.
func (x *Explainer) explainTokens(planned *plan.Plan, c *dispatch.DryChoice, ids []byte) *dispatch.DryChoice {
	if ids == nil {
		return c
	}
	if p := x.Reader.WithTokens(planned, ids); p != nil {
		if by := x.Dispatcher.Explain(p); by.Overlap() > c.Overlap() {
			return by
		}
	}
	return c
}
