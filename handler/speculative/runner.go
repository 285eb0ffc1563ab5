// Package speculative prefills the beginning of a session's next turn, if the client asks
// for it and the worker has time.
package speculative

import (
	"context"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/prometheus/client_golang/prometheus"
)

// The outcomes of speculative prefills.
const (
	outcomeOK      = "ok"      // it was computed
	outcomeFailed  = "failed"  // the worker did not answer, or with an error
	outcomeTimeout = "timeout" // it took too long
	outcomeStopped = "stopped" // the configuration ended
	outcomeBusy    = "busy"    // the worker had too much to do
	outcomeLimit   = "limit"   // the bound on their number was reached
	outcomeMemory  = "memory"  // there was no memory for the body
	outcomeUnfit   = "unfit"   // the turn did not end well, or its answer is too long or not all text
	outcomeOff     = "off"     // the operator does not allow it
)

const incidentNoSuccess = "speculative prefills fail"

// Total counts the turns whose clients asked for a speculative prefill. It is made once per
// process, so that counts survive reloads.
var Total = prometheus.NewCounterVec(prometheus.CounterOpts{
	Namespace: "caddy", Subsystem: "kv_router", Name: "speculative_total",
	Help: "Turns whose clients asked for a speculative prefill, by its outcome.",
}, []string{"pool", "outcome"})

// Runner makes the speculative prefills of a configuration.
type Runner struct {
	ctx     context.Context // ends with the configuration
	pool    *pool.Pool
	client  *upstream.Client
	allowed bool // by the operator
}

// NewRunner returns the runner of a configuration, which ends with ctx. allowed is whether the
// operator allows speculative prefills.
func NewRunner(ctx context.Context, p *pool.Pool, client *upstream.Client, allowed bool) *Runner {
	Total.WithLabelValues(p.Name, outcomeOK) // shows 0
	return &Runner{ctx: ctx, pool: p, client: client, allowed: allowed}
}

// Answering is for [dispatch.Dispatcher]. It expects a speculative prefill if the client asked for one. An
// engine that gets the hint prefills by itself.
func (r *Runner) Answering(a *attempt.Attempt, held bool, resp *http.Response) dispatch.FollowUp {
	p := a.Call.Plan
	if !p.Ext.AgentHints.SpeculativePrefill.Value {
		return nil
	}
	if e := a.Worker.Engine(); e.ReadsNVExt() {
		return nil
	}
	switch {
	case !r.allowed:
		r.count(outcomeOff)
		return nil
	case a.Worker.IsDecode() || a.Worker.IsBackup(), p.Request == nil || !p.Request.Continues() || p.Session.Final || held || p.Ext.TokenCount > 0,
		resp.StatusCode != http.StatusOK || body.Compressed(resp.Header) || a.Call.Body == nil:
		r.count(outcomeUnfit)
		return nil
	}
	within, release := r.pool.Memory.Reserve(dispatch.MaxKeptText)
	if !within {
		release()
		r.count(outcomeMemory)
		return nil
	}
	return (&speculation{r: r, turn: a, release: release}).begin
}

func (r *Runner) count(outcome string) {
	Total.WithLabelValues(r.pool.Name, outcome).Inc()
	if outcome == outcomeFailed || outcome == outcomeTimeout {
		r.pool.Raise(time.Now(), incidentNoSuccess)
	}
}
