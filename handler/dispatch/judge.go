package dispatch

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// judge decides what follows from an attempt. It changes nothing, but misfit may read the
// beginning of resp.Body and put it back. resent: net/http sent the request twice, and err is
// the error of the second time. docs/reliability.md shows the result for each fault.
func (d *Dispatch) judge(ctx context.Context, resp *http.Response, resent bool, err error) verdict {
	if v, failed := d.judgePhases(ctx, resp, err); failed {
		return v
	}
	if err != nil {
		return d.judgeFailure(ctx, resent, err)
	}
	if v, refuses := d.judgeBackup(resp); refuses {
		return v
	}
	a, status := d.attempt, resp.StatusCode
	v := verdict{do: deliver, outcome: a.Shows(worker.OutcomeAnswered, ""), misfit: d.misfit(resp)}
	v.free = v.misfit == lacksModel || v.misfit == tooLong // one that lacks the path may have read a long upload
	switch {
	case v.misfit != fits: // the engine computed nothing, so any request may be sent again
		left := (v.misfit == lacksModel || d.plan.Infers()) && d.otherLeft()
		if v.reason = strconv.Itoa(status); v.misfit == tooLong {
			left, v.reason = d.longer(a.Worker, pool.Tried-1), "context"
		}
		if d.plan.Once == nil && left && d.mayRetry(false, false) {
			v.do = retry
		} else if v.misfit == lacksModel && a.Worker.KnownToServe(d.plan.Model) { // the worker lists it, and lacks it
			v.outcome = a.Errored(resp.Status, false)
		}
	case attempt.Retryable(status):
		if d.plan.ShowsHealth {
			v.outcome = a.Shows(worker.OutcomeBusy, "status "+resp.Status)
			v.outcome.Wait = attempt.RetryAfter(resp.Header)
		}
		if d.mayRetry(true, false) {
			v.do, v.reason = retry, strconv.Itoa(status)
		}
	case attempt.WorkersFault(status):
		v.outcome = a.Errored(resp.Status, status >= 500)
		// A proxy before the engine got no answer, which may be the request's fault.
		if v.suspect = status == http.StatusBadGateway; v.suspect && d.mayRetry(true, true) {
			v.do, v.reason = retry, "502"
		}
	case status < 300 && (d.plan.Request == nil || body.Compressed(resp.Header)):
		v.outcome = a.Shows(worker.OutcomeGood, "") // an answer that is read shows more
	}
	return v
}

// disownedFor is how long a backup is not asked that refuses the router's key.
const disownedFor = time.Minute

// judgeBackup judges an answer by which a backup refuses the router and not the client. ok is false for
// other answers.
func (d *Dispatch) judgeBackup(resp *http.Response) (v verdict, ok bool) {
	a, status := d.attempt, resp.StatusCode
	if !a.Worker.IsBackup() || !attempt.Disowns(status) {
		return v, false
	}
	v = verdict{do: fail, outcome: a.Shows(worker.OutcomeBusy, "status "+resp.Status), withheld: true, reason: strconv.Itoa(status)}
	switch v.outcome.Wait = attempt.RetryAfter(resp.Header); {
	case status < 500 && attempt.TheirKey(a.Worker.Settings().Headers): // another client may be welcome
		v.do, v.outcome, v.withheld, v.blameless = deliver, a.Shows(worker.OutcomeAnswered, ""), false, true
		v.free = true
	case !attempt.Retryable(status):
		v.outcome.Wait = max(v.outcome.Wait, disownedFor)
	}
	if d.mayRetry(true, false) {
		v.do = retry
	}
	return v, true
}

// judgePhases decides what follows from an attempt whose pair of workers failed. ok is false if it
// did not: then the attempt is judged as any other.
func (d *Dispatch) judgePhases(ctx context.Context, resp *http.Response, err error) (v verdict, ok bool) {
	if d.phases == nil || ctx.Err() != nil {
		return v, false
	}
	failed := d.phases.Failure(resp, err)
	if failed == nil {
		return v, false
	}
	v = verdict{do: retry, reason: failed.Reason, phases: failed, suspect: d.phases.Broke(failed)}
	if !d.Limits.allow(d.start, d.attempts) || v.suspect && d.lastSuspect() {
		v.do = fail
		if resp != nil {
			v.do = deliver
		}
	}
	return v, true
}

func (d *Dispatch) judgeFailure(ctx context.Context, resent bool, err error) verdict {
	a := d.attempt
	if ctx.Err() != nil || d.plan.Once != nil && d.plan.Once.Failed.Load() {
		return verdict{do: fail} // and nothing is recorded of the worker
	}
	if _, own := errors.AsType[*api.Refusal](err); own || attempt.Unsendable(err) {
		return verdict{do: fail}
	}
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	v := verdict{do: fail, outcome: a.Unanswered(err), suspect: !unconnected || resent}
	if errors.Is(err, attempt.ErrDrained) {
		v.outcome, v.suspect = worker.Outcome{}, false
	}
	if d.mayRetry(!unconnected, v.suspect) {
		v.do, v.reason = retry, "broken"
		if ended, ok := errors.AsType[*attempt.EndedError](err); ok {
			v.reason = ended.Reason
		} else if unconnected {
			v.reason = "refused"
		}
	}
	return v
}

// action is what follows from an attempt.
type action uint8

const (
	deliver action = iota // the client gets the answer
	retry                 // another attempt follows
	fail                  // the client gets the held answer, or an error
	putOff                // the client must try again later: see putsOff
)

// verdict is what follows from an attempt.
type verdict struct {
	do        action
	reason    string         // of a retry, as metrics name it
	outcome   worker.Outcome // what the pool records of the worker
	phases    *split.Error   // the pair of workers failed, and not the attempt's worker; nil otherwise
	suspect   bool           // the engine may have begun to compute: the request may have crashed it
	misfit    misfit         // the worker cannot serve the request, and another one may
	blameless bool           // a retry is not the worker's fault
	free      bool           // a retry is not charged to the retry budget
	withheld  bool           // the client must not see the answer
}

// These functions decide whether another attempt may follow. "Limits" are lb_try_duration and
// lb_retries. A pinned request has no further attempt, but for another pair of workers.
//
//	                                         with limits         without limits
//	mayRetry      may any attempt follow?    while the limits    while an untried worker is left, and
//	                                         allow it            suspects are fewer than maxSuspects
//	next          may a tried worker         the same            never
//	              get it again?
//	lastSuspect   is the present attempt     never               if one suspect more makes
//	              the last if it breaks?                         maxSuspects
//
// Suspects do not count with limits, because the operator has chosen them.

// mayRetry returns whether a further attempt may find a worker. reached: the present one may have reached a
// worker. suspect: it is one.
func (d *Dispatch) mayRetry(reached, suspect bool) bool {
	switch p := d.plan; {
	case p.Once != nil && p.Once.Touched.Load(), reached && !p.Repeatable:
		return false
	case d.Limits.Set():
		return d.fixed == nil && d.Limits.allow(d.start, d.attempts)
	}
	return d.suspects < maxSuspects && (!suspect || !d.lastSuspect()) && d.otherLeft()
}

// lastSuspect returns whether no attempt may follow if the present one breaks.
func (d *Dispatch) lastSuspect() bool {
	return !d.Limits.Set() && d.suspects+1 >= maxSuspects
}

// IsFinal returns whether no attempt on another worker can follow. Either no untried
// worker is left, or lastSuspect holds, or the retry budget is spent.
func (d *Dispatch) IsFinal() bool {
	return !d.otherLeft() || d.lastSuspect() || d.Pool.Budget.Spent(time.Now())
}

// maxSuspects bounds the failed attempts that may have reached an engine: the request itself
// may crash engines.
const maxSuspects = 2

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
	if d.fixed != nil || body.Compressed(resp.Header) {
		if resp.StatusCode == http.StatusNotFound && unplanned {
			return lacksPath
		}
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

// refused records that the present attempt's worker cannot serve the request.
func (d *Dispatch) refused(why misfit) {
	a := d.attempt
	d.unfit = append(d.unfit, a.Worker)
	switch why {
	case fits:
	case lacksModel:
		d.lacks = d.plan.Model != "" // else nothing says that any worker has it
	case lacksPath:
	case tooLong:
		d.beyond = max(d.beyond, beyondOf(d.plan, a.Worker))
	}
}

// beyondOf returns for how many tokens a worker must have room after another one has refused the prompt
// as too long.
func beyondOf(p *plan.Plan, w *worker.Worker) int64 {
	prompt, _ := p.Length()
	return cmp.Or(w.Room(), max(1, prompt))
}

// longer returns whether another worker, up to a verdict, has room for a longer prompt than w. An unknown
// room may be longer than a known one.
func (d *Dispatch) longer(w *worker.Worker, worst pool.Verdict) bool {
	want := d.Wants()
	want.Beyond = max(want.Beyond, beyondOf(d.plan, w))
	return d.Pool.Some(&want, d.offers, func(other *worker.Worker, v pool.Verdict) bool {
		room := other.Room()
		return other != w && v <= worst && (room > want.Beyond || room == 0 && w.Room() > 0)
	})
}

// putsOff returns whether a worker is left that could serve a request which others have refused. The
// client must then try again later, and d.failure says so.
func (d *Dispatch) putsOff() bool {
	if d.later || len(d.unfit) == 0 {
		return d.later
	}
	want := d.Wants()
	want.Tried = nil
	modelLeft := func(row pool.TableRow) bool {
		_, known := row.Worker.Serves(d.plan.Model)
		return !known && !slices.Contains(d.unfit, row.Worker) && d.Pool.Meets(&want, row.Worker) == pool.Fits
	}
	roomLeft := func(w *worker.Worker, v pool.Verdict) bool {
		return (v < pool.Short || v == pool.Unavailable) && w.Room() > d.beyond && !slices.Contains(d.unfit, w)
	}
	e := &api.Refusal{API: d.plan.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker}
	switch {
	case d.lacks && slices.ContainsFunc(d.offers.Table.Rows, modelLeft):
		d.Pool.Raise(time.Now(), "requests name an unknown model, and the models of a worker are unknown")
		e.Param, e.Err = "model", errors.New(
			"no worker is known to serve the model, and a worker whose models are unknown could not be asked; try again later")
	case d.beyond > 0 && d.Pool.Some(&want, d.offers, roomLeft):
		d.Pool.Raise(time.Now(), "requests are too long for the workers that can be reached")
		e.Err = errors.New("the request is too long for the workers that can be reached now; try again later")
	default:
		return false
	}
	d.later, d.failure = true, e
	return true
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
