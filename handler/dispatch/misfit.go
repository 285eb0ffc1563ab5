package dispatch

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// A worker may refuse a request that another one would serve. It lacks the model or the path, or the
// prompt is longer than its context. Such a refusal is asked elsewhere, and marks nobody down. The client gets
// it only if no worker could serve the request. While one that could is away, the client gets a 503
// and tries again.

// modelWords are in engines' errors for a model that they lack. lengthWords are in those for a prompt or
// an answer that is too long.
var (
	modelWords  = []string{"not found", "model_not_found", "does not exist", "no such model", "could not find"}
	lengthWords = []string{
		"context length", "context size", "context window", "context_length", "exceed_context", "too long", "longer than",
		"max_model_len", "model length", "input length", "prompt length", "allowed length", "sequence length", "max_tokens",
	}
)

// misfit returns why an answer refuses a request, if that is a misfit. It may read the beginning of
// resp.Body, and puts it back.
func (d *Dispatch) misfit(resp *http.Response) misfit {
	w := d.attempt.Worker
	unplanned := d.plan.API == nil
	if resp.StatusCode == http.StatusNotFound && unplanned && (d.pinned() || body.Compressed(resp.Header)) {
		return lacksPath
	}
	if d.pinned() || resp.StatusCode < 400 || body.Compressed(resp.Header) {
		return fits
	}
	named := d.plan.Model != ""
	switch resp.StatusCode {
	case http.StatusNotFound:
		switch {
		case (named || unplanned) && says(resp, "model"):
			return lacksModel
		case unplanned:
			return lacksPath
		}
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity:
		switch {
		case d.plan.Request == nil:
		case named && !w.KnownToServe(d.plan.Model) && says(resp, modelWords...):
			return lacksModel
		case d.longer(w, pool.Unavailable) && says(resp, lengthWords...):
			return tooLong
		}
	}
	return fits
}

// judgeMisfit judges such an answer. The engine computed nothing, so any request may be sent again. A
// model that the worker lists and lacks is the worker's fault.
func (d *Dispatch) judgeMisfit(resp *http.Response, why misfit) verdict {
	a := d.attempt
	v := verdict{do: deliver, outcome: a.Shows(pool.OutcomeAnswered, ""), misfit: why}
	left := (why == lacksModel || d.plan.Infers()) && d.otherLeft()
	if v.reason = strconv.Itoa(resp.StatusCode); why == tooLong {
		left, v.reason = d.longer(a.Worker, pool.Tried-1), "context"
	}
	switch {
	case d.plan.Once == nil && left && d.anotherTry(d.suspects):
		v.do = retry
	case why == lacksModel && a.Worker.KnownToServe(d.plan.Model):
		v.outcome = a.Errored(resp.Status, false)
	}
	return v
}

func (d *Dispatch) refused(why misfit) {
	a := d.attempt
	d.unfit = append(d.unfit, a.Worker)
	switch why {
	case fits:
	case lacksModel:
		d.lacks = d.plan.Model != "" // else nothing says that any worker has it
	case lacksPath:
	case tooLong:
		d.beyond = max(d.beyond, d.beyondOf(a.Worker))
	}
}

// beyondOf returns for how many tokens a worker must have room after another one has refused the prompt
// as too long.
func (d *Dispatch) beyondOf(w *worker.Worker) int64 {
	if most := w.Room(); most > 0 {
		return most
	}
	prompt, _ := d.plan.Length()
	return max(1, prompt)
}

// longer returns whether another worker, up to a verdict, has room for a longer prompt than w. An unknown
// room may be longer than a known one.
func (d *Dispatch) longer(w *worker.Worker, worst pool.Verdict) bool {
	want := d.Wants()
	want.Beyond = max(want.Beyond, d.beyondOf(w))
	for i, v := range d.Pool.Judge(&want, d.offers, time.Now()) {
		other := d.offers.Table.Rows[i].Worker
		if room := other.Room(); other != w && v <= worst && (room > want.Beyond || room == 0 && w.Room() > 0) {
			return true
		}
	}
	return false
}

// putsOff returns whether a worker is left that could serve a request which others have refused. The
// client must then try again later, and d.failure says so.
func (d *Dispatch) putsOff() bool {
	if d.later || len(d.unfit) == 0 {
		return d.later
	}
	e := &api.Refusal{API: d.plan.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker}
	switch {
	case d.lacks && d.modelLeft():
		d.Pool.Raise(time.Now(), "requests name an unknown model, and the models of a worker are unknown")
		e.Param, e.Err = "model", errors.New(
			"no worker is known to serve the model, and a worker whose models are unknown could not be asked; try again later")
	case d.beyond > 0 && d.roomLeft():
		d.Pool.Raise(time.Now(), "requests are too long for the workers that can be reached")
		e.Err = errors.New("the request is too long for the workers that can be reached now; try again later")
	default:
		return false
	}
	d.later, d.failure = true, e
	return true
}

// modelLeft returns whether a worker may serve the model and has not said otherwise.
func (d *Dispatch) modelLeft() bool {
	want := d.Wants()
	return slices.ContainsFunc(d.offers.Table.Rows, func(row pool.TableRow) bool {
		_, known := row.Worker.Serves(d.plan.Model)
		return !known && !slices.Contains(d.unfit, row.Worker) && d.Pool.Meets(&want, row.Worker) == pool.Fits
	})
}

// roomLeft returns whether a worker is known to have room for the prompt and has not refused it.
func (d *Dispatch) roomLeft() bool {
	want := d.Wants()
	want.Tried = nil
	for i, v := range d.Pool.Judge(&want, d.offers, time.Now()) {
		w := d.offers.Table.Rows[i].Worker
		if (v < pool.Short || v == pool.Unavailable) && w.Room() > d.beyond && !slices.Contains(d.unfit, w) {
			return true
		}
	}
	return false
}

// longestStall is how long the body of a refusal may take before the router closes it.
const longestStall = 5 * time.Second

// Misfit implements response.Mover.
func (o *delivery) Misfit(event []byte) bool {
	return o.d.longer(o.attempt.Worker, pool.Tried-1) && hasWord(event, lengthWords)
}

// says returns whether the beginning of an answer's body has one of some words, in any case. It puts
// the beginning back.
func says(resp *http.Response, words ...string) bool {
	from := resp.Body
	stalled := time.AfterFunc(longestStall, func() { _ = from.Close() })
	defer stalled.Stop()
	head, err := io.ReadAll(io.LimitReader(from, 4<<10))
	resp.Body = &response.Replayed{ReadCloser: from, Begin: head, Err: err}
	return hasWord(head, words)
}

// hasWord returns whether a text has one of some words, in any case.
func hasWord(text []byte, words []string) bool {
	text = bytes.ToLower(text)
	return slices.ContainsFunc(words, func(word string) bool { return bytes.Contains(text, []byte(word)) })
}
