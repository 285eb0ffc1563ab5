package admin

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
)

// AnswerQuery answers a client that asks where its request would go, with the worker
// and the prompt's token ids under nvext. It is the first of two stages; in the second
// the client names the worker. Nothing is booked, remembered or computed. If the
// request has no token ids, the chosen worker's engine is asked for them. The error is
// a Refusal where the router refuses the request.
func (x *Explainer) AnswerQuery(w http.ResponseWriter, r *http.Request, p *plan.Plan) error {
	c := x.Dispatcher.Explain(r, p)
	if c.Refused != nil {
		return c.Refused
	}
	if len(c.Candidates) == 0 {
		return errNoChoice
	}
	ids := tokenIDs(p)
	if ids == nil {
		ids = x.askTokens(r, p, c.Workers[c.Picked.Chosen])
		c = x.explainTokens(r, p, c, ids)
	}
	answer, err := x.encodeQuery(p, c, ids)
	if err != nil {
		return err
	}
	x.Figures.Requests[dispatch.OutcomeQuery].Inc()
	stream := p.Request.Stream
	p.Close() // the client may take its time to read
	kind := "application/json"
	if stream {
		kind = body.EventStream
		answer = fmt.Appendf(nil, "data: %s\n\ndata: [DONE]\n\n", answer)
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
	_, release := x.Pool.Memory.Reserve(int64(len(answer)))
	defer release()
	_, err = w.Write(answer) //nolint:gosec // JSON, and said to be
	return err
}

var errNoChoice = errors.New("no worker was chosen")

// queryAnswer is the answer to a query. Fields that only chat and completions have
// are left out in other APIs.
type queryAnswer struct {
	ID      string          `json:"id"`
	Object  string          `json:"object,omitempty"`
	Created int64           `json:"created"`
	Model   string          `json:"model"`
	Choices *[0]int         `json:"choices,omitempty"`
	NVExt   json.RawMessage `json:"nvext"`
}

// encodeQuery returns the answer as JSON. ids are the prompt's, nil if unknown.
func (x *Explainer) encodeQuery(p *plan.Plan, c *dispatch.DryChoice, ids []byte) ([]byte, error) {
	target := c.Candidates[c.Picked.Chosen].Target
	members := []nvext.Member{{Name: nvext.NameWorkerID, Value: nvext.OneWorker(target.Worker, target.Rank).Append(nil)}}
	if ids != nil {
		members = append(members, nvext.Member{Name: nvext.NameTokenIDs, Value: ids})
	}
	if p.Ext.QueryExplains() {
		why, err := json.Marshal(x.view(p, c))
		if err != nil {
			return nil, fmt.Errorf("encoding the explanation: %w", err)
		}
		members = append(members, nvext.Member{Name: "explain", Value: why})
	}
	answer := queryAnswer{ID: "query-" + rand.Text(), Created: time.Now().Unix(), Model: p.Model, NVExt: nvext.AppendObject(nil, members)}
	switch p.API.Name() {
	case "chat":
		answer.Object, answer.Choices = "chat.completion", new([0]int)
		if p.Request.Stream {
			answer.Object = "chat.completion.chunk"
		}
	case "completions":
		answer.Object, answer.Choices = "text_completion", new([0]int)
	}
	return json.Marshal(answer)
}

// tokenIDs returns the token ids of a request's prompt as JSON, nil if it has none.
func tokenIDs(p *plan.Plan) []byte {
	if p.Ext.TokenCount > 0 {
		return nvext.AppendTokens(nil, p.Ext.TokenData)
	}
	if p.Body.Buffer == nil {
		return nil
	}
	return p.Request.AppendTokens(nil, p.Body.Buffer.Data)
}
