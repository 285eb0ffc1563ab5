package dispatch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Report is what became of a request, for the access log, the span and the metrics.
type Report struct {
	Outcome  string
	Attempts int
	Waited   time.Duration // in the queue, over all attempts
	// TurnedAway says that the router refused the request because all workers were full.
	TurnedAway bool

	// Chosen is whether a worker was chosen. The next fields describe the one that
	// answered, else the last one.
	Chosen       bool
	Target       kvscore.Target
	Upstream     string
	Reason       string
	Overlap      float64 // blocks
	Predicted    int64   // tokens of the prompt that the worker was predicted to hold
	PromptTokens int64   // as estimated

	Status int   // of the answer; 0 if there was none
	Err    error // the failure of the last attempt or of the answer; nil if none

	TTFT time.Duration // 0 if unknown
	response.Counts
}

// report sums up the request, which has ended.
func (d *Dispatch) report() *Report {
	r := &Report{Outcome: d.outcome(), Attempts: d.attempts, Waited: d.wait.waited, TurnedAway: d.wait.turnedAway != nil, Counts: response.Counts{Prompt: -1, Completion: -1, Cached: -1}}
	if a := d.reported(); a != nil {
		r.Chosen, r.Target, r.Upstream, r.Reason = true, a.Target, a.Worker.Dial, a.reason
		r.Overlap, r.Predicted, r.PromptTokens = a.Terms.OverlapBlocks, a.Terms.OverlapTokens, a.Tokens
	}
	r.Err = d.failure
	if r.Err == nil {
		r.Err = d.err
	}
	o := d.answer
	if o == nil {
		return r
	}
	r.Status = o.Status
	if r.Outcome == outcomeBroken {
		r.Err = o.Broken
	}
	if !o.Read {
		return r
	}
	if !o.First.IsZero() {
		r.TTFT = o.First.Sub(d.start)
	}
	r.Counts = o.Counts
	return r
}

// MarshalLogObject writes the field kv_router of the access log. Session keys are secret and
// left out.
func (r *Report) MarshalLogObject(e zapcore.ObjectEncoder) error {
	if r.Chosen {
		e.AddUint64("worker", r.Target.Worker)
		e.AddString("upstream", r.Upstream)
		e.AddUint32("dp_rank", r.Target.Rank)
		e.AddString("reason", r.Reason)
	}
	e.AddString("outcome", r.Outcome)
	e.AddInt("attempts", r.Attempts)
	if r.Chosen {
		e.AddInt64("overlap_blocks", int64(r.Overlap))
		e.AddInt64("predicted_cached_tokens", r.Predicted)
		e.AddInt64("estimated_prompt_tokens", r.PromptTokens)
	}
	if r.Waited > 0 || !r.Chosen {
		e.AddDuration("queue_wait", r.Waited)
	}
	if r.TTFT > 0 {
		e.AddDuration("ttft", r.TTFT)
	}
	for i, name := range [...]string{"prompt_tokens", "completion_tokens", "cached_tokens"} {
		if n := r.counts()[i]; n >= 0 {
			e.AddInt64(name, n)
		}
	}
	return nil
}

func (r *Report) counts() [3]int64 { return [3]int64{r.Prompt, r.Completion, r.Cached} }

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
		return "the answer ends with an error", true
	}
	if r.Err != nil {
		return r.Outcome + ": " + r.Err.Error(), true
	}
	return r.Outcome, true
}

// Logged returns whether the access log has the report: a worker was chosen, or the request
// waited for one.
func (r *Report) Logged() bool { return r.Chosen || r.Waited > 0 || r.TurnedAway }

// outcome returns the outcome of the request, as metrics name it.
func (d *Dispatch) outcome() string {
	o := d.answer
	switch {
	case o == nil && d.wait.turnedAway != nil:
		return outcomeQueueRejected
	case o == nil && d.err == nil && d.returned:
		return outcomeClientGone // or an upgraded connection, at its end
	case o == nil:
		return outcomeUnavailable
	case o.Broken != nil && !errors.Is(o.Broken, context.Canceled):
		return outcomeBroken
	case !o.Whole && (!d.returned || o.Broken != nil):
		return outcomeClientGone
	case o.Status >= 400 || o.Garbled || o.Failed:
		return outcomeEngineError
	}
	return outcomeOK
}

// label adds the response headers that say how the request was routed.
func (a *attempt) label(h http.Header) {
	prefix := a.d.Labels
	if prefix == "" {
		return
	}
	h.Set(prefix+"Worker", strconv.FormatUint(a.Target.Worker, 10))
	h.Set(prefix+"Dp-Rank", strconv.FormatUint(uint64(a.Target.Rank), 10))
	h.Set(prefix+"Reason", a.reason)
	h.Set(prefix+"Overlap-Blocks", strconv.FormatInt(int64(a.Terms.OverlapBlocks), 10))
	h.Set(prefix+"Predicted-Cached-Tokens", strconv.FormatInt(a.Terms.OverlapTokens, 10))
}

// placeholder returns the value of one of our placeholders.
func (d *Dispatch) placeholder(key string) (any, bool) {
	name, ours := strings.CutPrefix(key, "http.kv_router.")
	if !ours {
		return nil, false
	}
	a := d.reported()
	switch {
	case name == "session":
		return d.plan.Session.Key.String(), !d.plan.Session.Key.IsZero()
	case name == "cached_tokens":
		return d.cached, d.cached >= 0
	case a == nil:
		return nil, false
	}
	switch name {
	case "worker":
		return a.Target.Worker, true
	case "dp_rank":
		return a.Target.Rank, true
	case "overlap_blocks":
		return int64(a.Terms.OverlapBlocks), true
	case "predicted_cached_tokens":
		return a.Terms.OverlapTokens, true
	case "reason":
		return a.reason, true
	}
	return nil, false
}

// reported returns the attempt that answers the client, else the latest; nil if there was none.
func (d *Dispatch) reported() *attempt {
	if d.answer != nil {
		return d.answer.attempt
	}
	return d.attempt
}

// log logs the choice.
func (a *attempt) log() {
	if c := a.d.Logger.Check(zap.DebugLevel, ""); c != nil {
		c.Message = fmt.Sprintf("[ROUTING] Best: worker_%d dp_rank=%d with %d/%d blocks overlap",
			a.Target.Worker, a.Target.Rank, int64(a.Terms.OverlapBlocks), int64(a.Terms.RequestBlocks))
		fields := []zap.Field{
			zap.String("upstream", a.Worker.Dial), zap.String("reason", a.reason), zap.Int64("prompt_tokens", a.Tokens),
			zap.Float64("predicted_ttft_ms", a.Terms.TTFT()), zap.Float64("cost", a.Terms.Cost),
		}
		if a.costsTime() {
			fields = append(fields, zap.Object("cost_terms_ms", termFields(a.Terms.Terms)))
		}
		c.Write(fields...)
	}
}

// termFields logs the terms of a cost, in milliseconds.
type termFields kvscore.Terms

func (f termFields) MarshalLogObject(e zapcore.ObjectEncoder) error {
	e.AddFloat64("wait", f.Wait)
	e.AddFloat64("prefill", f.Prefill)
	e.AddFloat64("delay", f.Delay)
	e.AddFloat64("decode", f.Decode)
	e.AddFloat64("turns", f.Turns)
	e.AddFloat64("leave", f.Leave)
	return nil
}
