package dispatch

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
)

// A worker may refuse a request that another one would serve, because it lacks the model. Such a
// refusal is asked elsewhere, and marks nobody down. The client gets it only if no worker could
// serve the request. While one that could is away, the client gets a 503 and tries again.

// unfit returns whether an answer says that the worker cannot serve the request, and another one may.
// It may read the beginning of resp.Body, and puts it back.
func (a *attempt) unfit(resp *http.Response) bool {
	d := a.d
	return resp.StatusCode == http.StatusNotFound && d.plan.Model != "" && !d.pinned() && !body.Compressed(resp.Header) &&
		bytes.Contains(bytes.ToLower(peek(resp)), []byte("model")) // else it lacks the path
}

// judgeUnfit judges such an answer. The engine computed nothing, so any request may be sent again.
// The answer is the worker's fault only if it lists the model.
func (a *attempt) judgeUnfit(resp *http.Response) verdict {
	d := a.d
	v := verdict{do: deliver, outcome: a.shows(pool.OutcomeAnswered, ""), unfit: true}
	if d.plan.Once == nil && d.otherLeft() && d.anotherTry(d.suspects) {
		v.do, v.reason = retry, "404"
	} else if a.Worker.KnownToServe(d.plan.Model) {
		v.outcome = a.errored(resp.Status, false)
	}
	return v
}

// putsOff returns whether a worker is left that could serve a request which others have refused. The
// client must then try again later, and d.failure says so.
func (d *Dispatch) putsOff() bool {
	if d.later || len(d.lacking) == 0 || !slices.ContainsFunc(d.offers.Table.Rows, func(row pool.TableRow) bool {
		_, known := row.Worker.Serves(d.plan.Model)
		return !known && !slices.Contains(d.lacking, row.Worker)
	}) {
		return d.later
	}
	d.later = true
	d.Pool.Incidents.Raise(time.Now(), "requests name an unknown model, and the models of a worker are unknown", d.Pool.Logger)
	d.failure = &api.Refusal{
		API: d.plan.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, Param: "model", Err: errModelUnknown,
	}
	return true
}

// putOff ends the attempt, and has the client try again later. Select tells the client, because
// Caddy counts an error here against the worker.
func (a *attempt) putOff(req *http.Request, resp *http.Response) (*http.Response, error) {
	d := a.d
	a.end(pool.AttemptRetried, false)
	if d.Limits.Set() && !d.Limits.allow(d.start, d.attempts) { // the proxy does not call Select again
		_ = resp.Body.Close()
		return d.giveUp()
	}
	d.retryWanted = true
	return a.hold(req, resp), nil
}

var errModelUnknown = errors.New(
	"no worker is known to serve the model, and a worker whose models are unknown could not be asked; try again later")

// longestStall is how long the body of a refusal may take before the router closes it.
const longestStall = 5 * time.Second

// peek reads the beginning of an answer's body, and puts it back.
func peek(resp *http.Response) []byte {
	from := resp.Body
	stalled := time.AfterFunc(longestStall, func() { _ = from.Close() })
	defer stalled.Stop()
	head, err := io.ReadAll(io.LimitReader(from, 4<<10))
	resp.Body = &response.Replayed{ReadCloser: from, Begin: head, Err: err}
	return head
}
