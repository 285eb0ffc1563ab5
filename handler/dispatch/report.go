package dispatch

import (
	"cmp"
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Report is what became of a request, for the access log, the span and the metrics.
type Report struct {
	Outcome  string
	Attempts int
	Waited   time.Duration // in the queue, over all attempts
	Code     string        // of the router's refusal; empty if it refused nothing, or no worker answered
	// Class and Tenant are the request's, as placeholders have them.
	Class, Tenant string

	// attempt is the one that answered, else the last one; nil if no worker was chosen.
	attempt *attempt.Attempt

	Err     error         // the failure of the last attempt or of the answer; nil if none
	TTFT    time.Duration // 0 if unknown
	Resumed int           // how often the stream went on elsewhere
	// Summary is the answer's; without an answer, its status is 0 and its counts are unknown.
	*response.Summary
}

// report sums up the request, which has ended.
func (d *Dispatch) report() *Report {
	r := &Report{
		Outcome: outcomeOK, Attempts: d.attempts, Waited: d.wait.waited,
		attempt: d.attempt, Err: cmp.Or(d.failure, d.err), Summary: &unanswered,
	}
	r.Class, r.Tenant = d.plan.ClassName(), d.plan.Tenant.Name
	if away := d.wait.turnedAway; away != nil {
		r.Code = away.Code
	}
	o := d.answer
	if o != nil {
		r.attempt, r.Summary, r.Resumed = o.attempt, &o.Summary, o.moved
		if !o.First.IsZero() {
			r.TTFT = o.First.Sub(d.start)
		}
	}
	switch {
	case o == nil && d.wait.turnedAway != nil:
		r.Outcome = outcomeQueueRejected
	case o == nil && d.err == nil && d.returned:
		r.Outcome = outcomeClientGone // or an upgraded connection, at its end
	case o == nil:
		r.Outcome = outcomeUnavailable
	case o.Broken != nil && !errors.Is(o.Broken, context.Canceled):
		r.Outcome, r.Err = outcomeBroken, o.Broken
	case !o.Whole && (!d.returned || o.Broken != nil):
		r.Outcome = outcomeClientGone
	case o.Status >= 400 || o.Malformed || o.Failed:
		r.Outcome = outcomeEngineError
	}
	return r
}

var unanswered = response.Summary{Counts: response.Counts{Prompt: -1, Completion: -1, Cached: -1}}

// Refused returns the report of a request that was refused before a worker was chosen.
func Refused(outcome string, err *api.Refusal) *Report {
	return &Report{Outcome: outcome, Code: err.Code, Err: err, Summary: &unanswered}
}

// reportFacts are what a report shows in the access log and in the request's span, by their
// names there. A value is nil if there is none.
var reportFacts = [...]struct {
	access, span string
	of           func(*Report) any
}{
	{access: "outcome", span: "outcome", of: func(r *Report) any { return r.Outcome }},
	{access: "refused", span: "refused", of: func(r *Report) any { return attempt.When(r.Code != "", r.Code) }},
	{access: "class", span: "class", of: func(r *Report) any { return attempt.When(r.Class != "", r.Class) }},
	{access: "tenant", span: "tenant", of: func(r *Report) any { return attempt.When(r.Tenant != "", r.Tenant) }},
	{access: "attempts", span: "attempts", of: func(r *Report) any { return int64(r.Attempts) }},
	{access: "resumed", span: "resumed", of: func(r *Report) any { return attempt.When(r.Resumed > 0, int64(r.Resumed)) }},
	{access: "queue_wait", span: "queue_wait_seconds", of: func(r *Report) any { return attempt.When(r.Waited != 0, r.Waited.Seconds()) }},
	{access: "ttft", span: "time_to_first_token_seconds", of: func(r *Report) any { return attempt.When(r.TTFT != 0, r.TTFT.Seconds()) }},
	{access: "prompt_tokens", span: "input_tokens", of: func(r *Report) any { return known(r.Prompt) }},
	{access: "completion_tokens", span: "output_tokens", of: func(r *Report) any { return known(r.Completion) }},
	{access: "cached_tokens", span: "cached_tokens", of: func(r *Report) any { return known(r.Cached) }},
}

// known returns a number of tokens, nil if it is unknown.
func known(n int64) any { return attempt.When(n >= 0, n) }

// MarshalLogObject writes the field kv_router of the access log. Session keys are secret and
// left out.
func (r *Report) MarshalLogObject(e zapcore.ObjectEncoder) error {
	if r.attempt != nil {
		for _, f := range r.attempt.Fields() {
			f.AddTo(e)
		}
	}
	for _, f := range reportFacts {
		if v := f.of(r); v != nil {
			zap.Any(f.access, v).AddTo(e)
		}
	}
	return nil
}

func (r *Report) trace(t *attempt.Trace) {
	if t == nil {
		return
	}
	for _, f := range reportFacts {
		t.Set(f.span, f.of(r))
	}
	if r.Status != 0 {
		t.Set("status", int64(r.Status))
		t.Set("worker", r.attempt.Target.Worker)
	}
	t.Set("gen_ai.usage.input_tokens", known(r.Prompt))
	t.Set("gen_ai.usage.output_tokens", known(r.Completion))
	t.Set("gen_ai.usage.cache_read.input_tokens", known(r.Cached))
	why, bad := r.fault()
	if !bad {
		why = ""
	}
	t.End(why)
}

func (d *Dispatch) placeholder(key string) (any, bool) {
	name, ours := strings.CutPrefix(key, "http.kv_router.")
	if !ours {
		return nil, false
	}
	switch name {
	case "session":
		return d.plan.Session.Key.String(), !d.plan.Session.Key.IsZero()
	case "cached_tokens":
		return d.cached, d.cached >= 0
	}
	a := d.attempt
	if d.answer != nil {
		a = d.answer.attempt
	}
	if a != nil {
		if fact, ok := a.Fact(name); ok {
			return fact, true
		}
	}
	return d.plan.Placeholder(key)
}

// fault returns whether the outcome is an error of the service, and why. An engine's 4xx is the
// client's error: why then names the status, and bad is false. A client that leaves is no error.
func (r *Report) fault() (why string, bad bool) {
	switch r.Outcome {
	case outcomeOK, outcomeClientGone:
		return "", false
	case outcomeBroken:
		return "stream broke: " + r.Err.Error(), true
	case outcomeEngineError:
		if r.Status >= 400 {
			return "status " + strconv.Itoa(r.Status), r.Status >= 500
		}
		return "the answer ends with an error", r.ErrorStatus >= 500 || r.ErrorStatus == 0
	}
	if r.Err != nil {
		return r.Outcome + ": " + r.Err.Error(), true
	}
	return r.Outcome, true
}

// Logged returns whether the access log has the report: a worker was chosen, or the request
// waited for one or was refused.
func (r *Report) Logged() bool {
	return r.attempt != nil || r.Waited > 0 || r.Code != "" || r.Attempts == 0 && r.Err != nil
}

// CountUser counts a request of a pool that has ended, by its client whom Caddy has authenticated. An
// empty name is none.
func CountUser(pool, name string, r *Report) {
	if name == "" {
		return
	}
	name = userLabels.Label(name)
	userRequests.WithLabelValues(pool, name, r.Outcome).Inc()
	countTokens(pool, name, "prompt", r.Prompt)
	countTokens(pool, name, "cached", r.Cached)
	countTokens(pool, name, "output", r.Completion)
}

// Charge charges what the request has used of its tenant's limits. It returns false if the engine's
// counts of tokens are impossible. A request that no engine has answered costs nothing, unless its
// client left while one computed.
func (r *Report) Charge(now time.Time, res *quota.Reservation) (plausible bool) {
	switch {
	case r.Status >= 400:
		res.Refused(now)
	case r.Status == 0 && (r.attempt == nil || r.Outcome != outcomeClientGone):
		res.Drop(now)
	default:
		return res.Settle(now, quota.Usage{
			Prompt: r.Prompt, Completion: r.Completion, Cached: r.Cached, Seen: int64(r.Chunks),
			Whole: r.Outcome == outcomeOK && (!r.Read || !r.Stream),
		})
	}
	return true
}
